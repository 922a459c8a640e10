"""`loadgen calibrate`: measure a replica and write what a simulated one needs to be as fast."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadgen.calibrate.fit import Prefill, Timing, fit, worst_error
from loadgen.calibrate.probes import Measured, Plan, Probes
from loadgen.client import Client, Deadlines
from loadgen.errors import CalibrationError, LoadgenError

_QUICK = Plan(longest_tokens=2048, budget_s=90.0)
_THOROUGH = Plan(longest_tokens=8192, budget_s=300.0, cold_runs=5)
_REQUEST = Deadlines(connect_s=5.0, read_s=60.0, total_s=60.0)
_INFO_S = 10.0
_EXAMPLES = """
Examples:

  loadgen calibrate http://127.0.0.1:8000 --quick --out calibration.json

  loadgen replica --calibration calibration.json
"""

Option = typer.Option


def calibrate(
    url: Annotated[str, typer.Argument(help="A replica, idle: any OpenAI-compatible endpoint.")],
    quick: Annotated[
        bool, Option("--quick", help="Up to 90 s, prompts up to 2,048 tokens; else 300 s, 8,192.")
    ] = False,
    model: Annotated[
        str | None, Option(help="Model to ask for; default: the first listed.")
    ] = None,
    longest: Annotated[
        int | None, Option(min=256, help="Longest prompt, tokens; default: by --quick.")
    ] = None,
    budget: Annotated[
        float | None, Option(min=5, help="Seconds to spend; default: by --quick.")
    ] = None,
    out: Annotated[Path | None, Option(help="File to write for `loadgen replica`.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the file's content.")] = False,
) -> None:
    """Measure a replica: prefill cold, warm and partly cached, and decoding in batches."""
    plan = _QUICK if quick else _THOROUGH
    plan = Plan(longest or plan.longest_tokens, budget or plan.budget_s, plan.cold_runs)
    try:
        found = asyncio.run(_calibrate(url.rstrip("/"), model, plan))
        if out is not None:
            out.write_text(json.dumps(found, indent=2) + "\n")
    except (LoadgenError, OSError) as error:
        typer.echo(f"loadgen calibrate: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(found, indent=2) if as_json else _table(found))
    if out is not None:
        typer.echo(f"written to {out}", err=True)


calibrate.__doc__ = f"{calibrate.__doc__}\n{_EXAMPLES}"


async def _calibrate(url: str, model: str | None, plan: Plan) -> dict[str, Any]:
    name, context_tokens = await _served(url, model)
    longest = min(plan.longest_tokens, context_tokens or plan.longest_tokens)
    plan = Plan(longest, plan.budget_s, plan.cold_runs)
    async with Client(url, name, deadlines=_REQUEST) as client:
        probes = Probes(
            client,
            plan,
            secrets.randbits(64),
            progress=lambda line: typer.echo(f"loadgen calibrate: {line}", err=True),
        )
        measured = await probes.measure()
    return describe(name, measured, fit(measured.prefills, measured.decodes))


async def _served(url: str, model: str | None) -> tuple[str, int | None]:
    """The model's name and its context in tokens. Raises CalibrationError."""
    try:
        async with httpx.AsyncClient(timeout=_INFO_S, trust_env=False) as client:
            answer = await client.get(f"{url}/v1/models")
            answer.raise_for_status()
            cards = {card["id"]: card.get("max_model_len") for card in answer.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{url}/v1/models: {error or type(error).__name__}") from error
    name = model or next(iter(cards), "")
    if name not in cards:
        raise CalibrationError(f"{url} serves {', '.join(cards) or 'nothing'}, not {name!r}")
    return name, cards[name]


def describe(model: str, measured: Measured, timing: Timing) -> dict[str, Any]:
    """The content of a calibration file."""
    return {
        "model": model,
        "timing": timing.json(),
        "worst_error": round(worst_error(timing, measured.prefills), 3),
        "prefill": [_row(point, timing) for point in measured.prefills],
        "decode": [{"batch": batch, "gap_s": round(gap_s, 5)} for batch, gap_s in measured.decodes],
        "cut_short": measured.cut_short,
    }


def _row(point: Prefill, timing: Timing) -> dict[str, Any]:
    new, cached, ttft_s = point
    fitted_s = timing.ttft_s(new, cached)
    times = {"ttft_s": round(ttft_s, 5), "fitted_s": round(fitted_s, 5)}
    return {"new_tokens": new, "cached_tokens": cached, **times}


def _table(found: dict[str, Any]) -> str:
    rows = ["    new  cached   ttft s  fitted s"]
    for row in found["prefill"]:
        sizes = f"{row['new_tokens']:7} {row['cached_tokens']:7}"
        rows.append(f"{sizes} {row['ttft_s']:8.3f}  {row['fitted_s']:8.3f}")
    rows += [
        f"a batch of {row['batch']}: {row['gap_s'] * 1000:.1f} ms a token"
        for row in found["decode"]
    ]
    rows += _lines(found["cut_short"])
    rows.append(f"largest error of the fit: {found['worst_error']:.1%}")
    options = {name: value for name, value in found["timing"].items() if value}
    rows.append(" ".join(f"--{_option(name)} {value:g}" for name, value in options.items()))
    return "\n".join(rows)


def _lines(cut_short: Sequence[str]) -> list[str]:
    return [f"not measured, the time was over: {what}" for what in cut_short]


def _option(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")
