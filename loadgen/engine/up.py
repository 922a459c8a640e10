"""Starting a fleet for `scripts/engine up`: in the foreground, or in a keeper of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.engine.errors import ReplicaError
from loadgen.engine.fleet import EngineFleet, FleetOptions
from loadgen.engine.install import Engine
from loadgen.engine.keeper import Keeper, Life
from loadgen.engine.state import State
from loadgen.errors import LoadgenError


@dataclass(frozen=True)
class Request:
    """What `up` is to start; `say` tells the user of what runs."""

    engine: Engine
    state: State
    fleet: FleetOptions
    parent: int | None
    max_life_s: float
    say: Callable[[dict[str, Any]], None]


def start_here(request: Request, lock: int) -> int:
    """Keep the fleet in this process, until a signal or until the parent has ended."""
    life = Life(request.max_life_s, request.parent or os.getppid() or None)
    why = _keeper(request, lock, life).run(request.say)
    print(f"engine: ended: {why}", file=sys.stderr)
    return 0


def start_detached(request: Request, lock: int) -> int:
    """Keep the fleet in a process of its own; returns once it is healthy.

    Until then it ends with this process. Raises ReplicaError.
    """
    heard, tells = os.pipe()
    starter, hold = os.pipe()
    request.state.logs.mkdir(parents=True, exist_ok=True)
    if not os.fork():
        os.close(heard)
        os.close(hold)
        # Whatever happens, this process must not go on as its parent.
        try:
            _detached(request, lock, starter, tells)
        finally:
            os._exit(1)
    os.close(tells)
    os.close(starter)
    with os.fdopen(heard) as answers:
        try:
            answer = json.loads(answers.read() or "{}")
        finally:
            # Now the keeper goes on without this process, or, if it is still starting, ends.
            os.close(hold)
            answers.read()
    if "ready" not in answer:
        raise ReplicaError(answer.get("error", "the keeper has died; nothing is left running"))
    request.say(answer)
    return 0


def _detached(request: Request, lock: int, starter: int, tells: int) -> None:
    os.setsid()
    _redirect(request.state.logs / "keeper.log")

    def tell(answer: dict[str, Any]) -> None:
        os.write(tells, json.dumps(answer).encode())
        os.close(tells)

    try:
        life = Life(request.max_life_s, request.parent, starter)
        print(f"ended: {_keeper(request, lock, life).run(tell)}", flush=True)
    except (LoadgenError, OSError) as error:
        print(f"failed: {error}", flush=True)
        tell({"error": str(error)})
        os._exit(1)
    os._exit(0)


def _keeper(request: Request, lock: int, life: Life) -> Keeper:
    request.state.logs.mkdir(parents=True, exist_ok=True)
    for old in request.state.logs.glob("*.log"):
        if old.name != "keeper.log":
            old.unlink()
    fleet = EngineFleet(request.engine, request.state.logs, request.fleet)
    return Keeper(fleet, request.state, lock, life)


def _redirect(log: Path) -> None:
    with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
