"""`kvroute demo`. Only what the command line needs is imported before the command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.demo.experiment import Measured, Prepared
    from loadgen.demo.fleet import Fleet
    from loadgen.demo.settings import DemoSettings

INTERRUPTED = 130


class EngineKind(StrEnum):
    """What the replicas are."""

    SIMULATED = "simulated"
    VLLM = "vllm"


def demo(
    engine: Annotated[
        EngineKind, typer.Option(help="vllm: real replicas, as scripts/install-engine installs.")
    ] = EngineKind.SIMULATED,
    seed: Annotated[int, typer.Option(help="Same seed, same traffic.")] = 1,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="Replicas.  [default: 4; real ones: 2]")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Seconds of traffic per policy, about.  [default: 18; real ones: 24]"
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas.")
    ] = "round_robin,least_load,cost",
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Replay a Mooncake trace (JSONL) in place of chats."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to take from the trace.")] = 300,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the result to this file as well.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the last policy serving until Ctrl-C.")
    ] = False,
) -> None:
    """Shows on this machine what KV-aware routing gains: simulated replicas, real gateway.

    Starts simulated vLLM replicas, each of whose caches holds about a quarter of the working set,
    and the gateway with its own private Valkey; sends the same open-loop multi-turn chats under
    each policy, and compares with an oracle that knows every cache and queue. Takes about 80
    seconds. Ctrl-C, or even kill -9, leaves no process and no file behind.

    With --engine vllm the replicas are real ones on this machine's cores, the traffic is small, and
    what is reused is what the engines say. Takes three to five minutes, without an oracle.
    """
    from asyncio import CancelledError

    from loadgen.demo.settings import parse_policies
    from loadgen.errors import LoadgenError

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json.parent} is not a folder", param_hint="--json")
    if trace is not None and engine is EngineKind.VLLM:
        raise typer.BadParameter("is for simulated replicas", param_hint="--trace")
    try:
        names = parse_policies(policies)
        if engine is EngineKind.VLLM:
            failed = _run_real(seed, replicas or 2, duration or 24.0, names, json, keep)
        else:
            from loadgen.demo.settings import DemoSettings

            sizes = (replicas or 4, duration or 18.0)
            failed = _run(DemoSettings(seed, *sizes, names, trace, requests), json, keep)
    except (KeyboardInterrupt, CancelledError):
        raise typer.Exit(INTERRUPTED) from None
    except LoadgenError as error:
        typer.echo(f"kvroute demo: {error}", err=True)
        raise typer.Exit(1) from None
    if failed:
        raise typer.Exit(1)


def _run_real(
    seed: int,
    replicas: int,
    duration: float,
    policies: tuple[str, ...],
    json: Path | None,
    keep: bool,
) -> bool:
    from loadgen.demo.real import RealSettings
    from loadgen.demo.real_command import run_real

    return run_real(RealSettings(seed, replicas, duration, policies), json, keep)


def _run(settings: DemoSettings, json: Path | None, keep: bool) -> bool:
    """Runs and reports; whether a request failed."""
    import asyncio

    from rich.console import Console

    from loadgen.demo.experiment import prepare

    console = Console()
    with console.status("Writing the traffic and playing the oracle in virtual time"):
        prepared = prepare(settings)
    measured = asyncio.run(_measure(prepared, console, json, keep))
    return any(one.row.errors for one in measured.values())


async def _measure(
    prepared: Prepared, console: Console, json: Path | None, keep: bool
) -> dict[str, Measured]:
    import asyncio
    from contextlib import suppress

    from loadgen.demo.experiment import measure
    from loadgen.demo.progress import ProgressView
    from loadgen.demo.settings import MODEL_NAME

    end_on_sigterm()
    with ProgressView(console) as view:

        async def stay(measured: dict[str, Measured], fleet: Fleet) -> None:
            view.close()
            _report(prepared, measured, console, json)
            invite(console, fleet, MODEL_NAME)
            # Ctrl-C is how this is meant to end.
            with suppress(asyncio.CancelledError):
                await fleet.died()

        measured = await measure(prepared, view, stay if keep else None)
    if not keep:
        _report(prepared, measured, console, json)
    return measured


def _report(
    prepared: Prepared, measured: dict[str, Measured], console: Console, json: Path | None
) -> None:
    import orjson

    from loadgen.demo import report

    console.print(report.table(prepared, measured))
    console.print(report.sentence(prepared, measured), highlight=False)
    late = report.warning(measured)
    if late is not None:
        console.print(late, style="bold red", highlight=False, soft_wrap=True)
    if json is not None:
        text = orjson.dumps(report.as_json(prepared, measured), option=orjson.OPT_INDENT_2)
        json.write_bytes(text + b"\n")


def invite(console: Console, fleet: Fleet, model: str) -> None:
    """Says how to ask what is still serving."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    console.print("\nServing until Ctrl-C. Replicas: " + ", ".join(fleet.replica_urls))
    console.print("Try, in another terminal:\n", highlight=False)
    console.print(
        f"curl -i {fleet.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def end_on_sigterm() -> None:
    """SIGTERM ends the run in the same order as Ctrl-C: processes first, then this one.

    Not by way of SIGINT, which a shell's background job ignores.
    """
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
