"""The command line of scripts/engine: up, down and status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.engine import show
from loadgen.engine.errors import ReplicaError
from loadgen.engine.fleet import FleetOptions
from loadgen.engine.install import engine_folder, find_engine
from loadgen.engine.launch import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, ReplicaOptions, cores
from loadgen.engine.pool import TRANSFERS, PoolOptions
from loadgen.engine.process import fetch
from loadgen.engine.state import State, default_state, terminate
from loadgen.engine.up import Request, start_detached, start_here
from loadgen.errors import LoadgenError

MAX_LIFE_S = 4 * 3600.0
END_DEADLINE_S = 90.0
NOT_RUNNING, UNHEALTHY = 3, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 well, 1 failed, 2 usage, 3 nothing runs (of `status`)."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (LoadgenError, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine: interrupted; nothing is left running", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="engine", description="Real vLLM replicas on this machine's cores, and their end."
    )
    commands = top.add_subparsers(required=True, metavar="up|down|status")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--state", type=Path, help="state file; default: in the engine's folder")
    common.add_argument("--json", action="store_true", help="print JSON for machines")
    for name, run, text in (
        ("up", up, "start replicas, wait until they are healthy, print where they are"),
        ("down", down, "end what `up` started"),
        ("status", status, "what runs, and whether it is healthy"),
    ):
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        command.set_defaults(run=run)
        if name == "up":
            add_up_options(command)
    return top


def add_up_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--replicas", type=positive, default=1, help="default: 1")
    command.add_argument("--lmcache", action="store_true", help="share a pool (LMCache server)")
    command.add_argument("--l1-size-gb", type=float, default=1.0, help="of the pool; default: 1")
    command.add_argument(
        "--transfer",
        choices=TRANSFERS,
        default=TRANSFERS[0],
        help="lmcache_driven: the pool's stores and removals are published; engine_driven: faster",
    )
    command.add_argument("--blocks", type=positive, default=BLOCKS, help="KV blocks of a replica")
    command.add_argument("--block-tokens", type=positive, default=BLOCK_TOKENS)
    command.add_argument("--context-tokens", type=positive, default=CONTEXT_TOKENS)
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument(
        "--foreground", action="store_true", help="stay; ends with Ctrl-C or with its parent"
    )
    command.add_argument("--parent", type=positive, metavar="PID", help="end with this process")
    command.add_argument(
        "--max-life-s",
        type=float,
        default=MAX_LIFE_S,
        help="end so long after it is healthy; default: 4 hours",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def up(options: argparse.Namespace) -> int:
    """Idempotent: what runs already is told, not started again."""
    state = state_of(options)
    request = Request(
        engine=find_engine(engine_folder()),
        state=state,
        fleet=fleet_options(options),
        parent=options.parent,
        max_life_s=options.max_life_s,
        say=lambda about: say(about, options.json),
    )
    if options.replicas > len(cores()):
        print(f"engine: {options.replicas} replicas share {len(cores())} cores", file=sys.stderr)
    with state.locked() as lock:
        if lock is not None:
            pool = " and LMCache" if options.lmcache else ""
            print(
                f"engine: starting {options.replicas} of vLLM{pool}, a minute or two;"
                f" logs in {state.logs}",
                file=sys.stderr,
            )
            return (start_here if options.foreground else start_detached)(request, lock)
    return tell_running(state, options)


def fleet_options(options: argparse.Namespace) -> FleetOptions:
    pool = PoolOptions(options.l1_size_gb, options.block_tokens, options.transfer)
    return FleetOptions(
        replicas=options.replicas,
        replica=ReplicaOptions(
            block_tokens=options.block_tokens,
            blocks=options.blocks,
            context_tokens=options.context_tokens,
            dtype=options.dtype,
        ),
        pool=pool if options.lmcache else None,
    )


def tell_running(state: State, options: argparse.Namespace) -> int:
    """Something runs already: it is what was asked for, or the user must decide."""
    about = state.read()
    if about is None:
        raise ReplicaError("another fleet is just starting or ending; try again")
    wanted = (options.replicas, options.lmcache)
    runs = (len(about["replicas"]), about["pool"] is not None)
    if wanted != runs:
        what = f"{runs[0]} replicas with{'' if runs[1] else 'out'} LMCache"
        raise ReplicaError(f"{what} run already; end them with `scripts/engine down` first")
    print("engine: it runs already", file=sys.stderr)
    say(about, options.json)
    return 0 if about["ready"] else UNHEALTHY


def down(options: argparse.Namespace) -> int:
    """Idempotent. Waits until nothing is left."""
    state = state_of(options)
    about = state.read()
    if state.is_free():
        # Of a keeper that was killed; all that it kept has ended.
        state.remove()
        print("engine: nothing runs", file=sys.stderr)
        return 0
    if about is not None:
        terminate(about["pid"], about["pid_started"])
    if not state.wait_free(time.monotonic() + END_DEADLINE_S):
        raise ReplicaError(f"something has not ended in {END_DEADLINE_S:.0f} s; see {state.logs}")
    state.remove()
    print("engine: all has ended", file=sys.stderr)
    return 0


def status(options: argparse.Namespace) -> int:
    """0: all healthy; 1: something is not; 3: nothing runs."""
    state = state_of(options)
    about = state.read()
    if state.is_free() or about is None:
        print("engine: nothing runs", file=sys.stderr)
        if options.json:
            print(json.dumps(None))
        return NOT_RUNNING
    parts = [*about["replicas"], *([about["pool"]] if about["pool"] else [])]
    for part in parts:
        part["healthy"] = serves(part)
    say(about, options.json)
    return 0 if all(part["healthy"] for part in parts) else UNHEALTHY


def serves(part: dict[str, Any]) -> bool:
    try:
        fetch(f"{part['url']}/{'healthcheck' if 'kind' in part else 'health'}")
    except OSError:
        return False
    return True


def state_of(options: argparse.Namespace) -> State:
    return State(options.state.expanduser().absolute()) if options.state else default_state()


def say(about: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(about, indent=2) if as_json else show.table(about), flush=True)
