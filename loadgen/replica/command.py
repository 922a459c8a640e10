"""`loadgen replica`: serve simulated vLLM replicas until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
import zmq

from loadgen.replica.api import Flavor
from loadgen.replica.calibration import read_calibration
from loadgen.replica.errors import ReplicaError
from loadgen.replica.faults import parse_plan
from loadgen.replica.model import EngineModel, SchedulingPolicy
from loadgen.replica.publisher import ReplayFraming
from loadgen.replica.server import Fleet, FleetConfig
from loadgen.replica.setup import Events, Pool, Setup
from loadgen.replica.wire import EventEncoding, HashForm
from loadgen.tokenizer import default_folder

_DEFAULT = EngineModel()
_EXAMPLES = """
Examples:

  loadgen replica

  loadgen replica --replicas 4 --port 8100 --blocks 2000

  loadgen replica --ranks 2 --events array --replay-framing old --hash bytes

  loadgen replica --flavor sglang --ranks 2

  loadgen replica --no-prefix-caching --kv-events connect --clock-skew 30

  loadgen replica --faults '{"cut_after_chunks": 3, "times": 5}'

  loadgen replica --calibration calibration.json

  loadgen replica --prefill-a 0 --prefill-b 0 --prefill-c 0 --decode-step 0.001

The first line on stdout tells every address:
{"replicas": [{"url": ..., "kv_events": [...], "replay": [...]}]}
"""

Option = typer.Option


def _seconds(what: str, default_s: float) -> Any:
    """A time that, left out, comes from the calibration, or else is the default."""
    return Option(min=0, help=f"s {what}; default: {default_s:g}.")


def replica(
    replicas: Annotated[int, Option(min=1, help="Replicas, each on a port of its own.")] = 1,
    ranks: Annotated[int, Option(min=1, help="Data-parallel ranks of each replica.")] = 1,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port of the first replica; 0: free ones.")
    ] = 0,
    kv_port: Annotated[
        int,
        Option(
            min=0, max=65535, help="First port of the KV events, two for each rank; 0: free ones."
        ),
    ] = 0,
    model: Annotated[str, Option(help="Name of the served model.")] = "sim-model",
    adapter: Annotated[list[str] | None, Option(help="A LoRA adapter's name; repeatable.")] = None,
    tokenizer: Annotated[Path | None, Option(help="Tokenizer folder; default: our own.")] = None,
    max_model_len: Annotated[int, Option(min=2, help="Longest prompt and reply, tokens.")] = 32768,
    block_size: Annotated[int, Option(min=1, help="Tokens per block.")] = 16,
    blocks: Annotated[int, Option(min=1, help="Blocks of each rank's cache.")] = _DEFAULT.blocks,
    calibration: Annotated[
        Path | None, Option(help="Times of a real replica, from `loadgen calibrate --out`.")
    ] = None,
    prefill_c: Annotated[float | None, _seconds("per prompt", _DEFAULT.prefill_c_s)] = None,
    prefill_a: Annotated[float | None, _seconds("per token", _DEFAULT.prefill_a_s)] = None,
    prefill_b: Annotated[float | None, _seconds("per token²", _DEFAULT.prefill_b_s)] = None,
    prefill_cached: Annotated[
        float | None, _seconds("per cached token", _DEFAULT.prefill_cached_s)
    ] = None,
    decode_step: Annotated[float | None, _seconds("per round", _DEFAULT.decode_step_s)] = None,
    decode_per_request: Annotated[
        float | None, _seconds("per round and request", _DEFAULT.decode_per_request_s)
    ] = None,
    max_batched_tokens: Annotated[int, Option(min=1, help="Token budget of a step.")] = 2048,
    max_num_seqs: Annotated[int, Option(min=1, help="Requests in a batch.")] = 64,
    events: Annotated[
        EventEncoding, Option(help="map: as vLLM 0.24 and later; array: before.")
    ] = EventEncoding.MAP,
    hash_form: Annotated[
        HashForm, Option("--hash", help="Block hashes as 64-bit integers or 32 bytes.")
    ] = HashForm.INT,
    replay_framing: Annotated[
        ReplayFraming, Option(help="new: as vLLM 0.26 and later; old: before.")
    ] = ReplayFraming.NEW,
    topic: Annotated[str, Option(help="ZMQ topic of the events.")] = "",
    buffer_steps: Annotated[int, Option(min=1, help="Batches kept for replay.")] = 10_000,
    scheduling_policy: Annotated[
        SchedulingPolicy, Option(help="Order of the waiting queue.")
    ] = SchedulingPolicy.FCFS,
    seed: Annotated[int, Option(help="What block hashes start from.")] = 0,
    flavor: Annotated[
        Flavor, Option(help="Whose routes, metrics and events: vllm or sglang.")
    ] = Flavor.VLLM,
    dev_mode: Annotated[
        bool, Option(help="Whether vLLM's developer routes are there: /sleep, /server_info, ...")
    ] = True,
    prefix_caching: Annotated[
        bool, Option("--prefix-caching/--no-prefix-caching", help="Whether blocks are reused.")
    ] = True,
    prompt_tokens_details: Annotated[
        bool,
        Option(
            "--prompt-tokens-details/--no-prompt-tokens-details",
            help="Whether usage tells cached tokens.",
        ),
    ] = True,
    ignore_salts: Annotated[bool, Option(help="Let `cache_salt` keep nothing apart.")] = False,
    engine_version: Annotated[
        str | None, Option(help="Told by /version; routes and fields are those of that release.")
    ] = None,
    clock_skew: Annotated[float, Option(help="Seconds that the clock is ahead.")] = 0.0,
    kv_events: Annotated[
        Events, Option(help="bind: others connect; connect: as a fixed host in the endpoint; off.")
    ] = Events.BIND,
    kv_listed_host: Annotated[
        str, Option(help="Host that is told of the events' addresses; *: the replica's own.")
    ] = "*",
    kv_listed_ranks: Annotated[
        int | None, Option(min=0, help="How many ranks' addresses are told; default: all.")
    ] = None,
    rank_hosts: Annotated[
        bool, Option(help="Rank r publishes on 127.0.0.(1+r), ports one higher each, as vLLM's.")
    ] = False,
    pool: Annotated[
        Pool, Option(help="What an LMCache server behind each rank has it announce.")
    ] = Pool.NONE,
    pool_blocks: Annotated[int, Option(min=1, help="Blocks that the pool keeps.")] = 16384,
    api_key: Annotated[
        list[str] | None, Option(help="Bearer token, as the engine's --api-key; repeatable.")
    ] = None,
    faults: Annotated[
        str,
        Option(help="Faults to begin with: JSON, as loadgen/replica/README.md lists them."),
    ] = "{}",
    exit_on_stdin_eof: Annotated[
        bool, Option("--exit-on-stdin-eof", help="Stop when standard input ends.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the addresses as one JSON line (always done).")
    ] = False,
) -> None:
    """Serve simulated vLLM replicas: HTTP, prefix cache, batching in real time, KV events."""
    try:
        given = {
            "prefill_c_s": prefill_c,
            "prefill_a_s": prefill_a,
            "prefill_b_s": prefill_b,
            "prefill_cached_s": prefill_cached,
            "decode_step_s": decode_step,
            "decode_per_request_s": decode_per_request,
        }
        times = {} if calibration is None else read_calibration(calibration)
        times |= {name: value for name, value in given.items() if value is not None}
        engine = EngineModel(
            **times,
            block_size_tokens=block_size,
            blocks=blocks,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy=scheduling_policy,
            prefix_caching=prefix_caching,
            ignore_salts=ignore_salts,
        )
        setup = Setup(
            version=engine_version,
            prompt_tokens_details=prompt_tokens_details,
            clock_skew_s=clock_skew,
            events=kv_events,
            listed_host=kv_listed_host,
            listed_ranks=kv_listed_ranks,
            rank_per_host=rank_hosts,
            pool=pool,
            pool_blocks=pool_blocks,
            api_keys=tuple(api_key or ()),
        )
        config = FleetConfig(
            replicas=replicas,
            ranks=ranks,
            host=host,
            port=port,
            kv_port=kv_port,
            model_name=model,
            adapters=tuple(adapter or ()),
            tokenizer=tokenizer or default_folder(),
            max_model_len_tokens=max_model_len,
            engine=engine,
            events=events,
            hash_form=hash_form,
            replay_framing=replay_framing,
            topic=topic,
            buffer_steps=buffer_steps,
            seed=seed,
            flavor=flavor,
            dev_mode=dev_mode,
            faults=parse_plan(faults),
            setup=setup,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, exit_on_stdin_eof=exit_on_stdin_eof))
    except (ReplicaError, OSError, zmq.ZMQError) as error:
        typer.echo(f"loadgen replica: {error}", err=True)
        raise typer.Exit(1) from error


replica.__doc__ = f"{replica.__doc__}\n{_EXAMPLES}"


async def serve(config: FleetConfig, *, exit_on_stdin_eof: bool) -> None:
    """Serve until SIGTERM, SIGINT or, if asked, the end of standard input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Fleet(config) as fleet:
        if exit_on_stdin_eof:
            threading.Thread(target=_watch_stdin, args=(loop, stop), daemon=True).start()
        sys.stdout.write(json.dumps(fleet.describe()) + "\n")
        sys.stdout.flush()
        await stop.wait()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # A thread, because standard input may be a file or a device, which no poller takes.
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    try:
        loop.call_soon_threadsafe(stop.set)
    except RuntimeError:
        # The loop is closed: the process ends anyway.
        return


def main() -> None:
    """Entry point of `python -m loadgen.replica`."""
    app = typer.Typer(add_completion=False)
    app.command()(replica)
    app()
