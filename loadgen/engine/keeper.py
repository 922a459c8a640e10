"""The process that a fleet's life hangs on: starts it, waits for a reason to end it, ends it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

from loadgen.engine.fleet import EngineFleet
from loadgen.engine.shared_memory import SharedMemoryWatch
from loadgen.engine.state import State, identity
from loadgen.engine.supervisor import adopt_orphans, kill_adopted, kill_descendants
from loadgen.errors import FleetError

_LOOK_S = 1.0


class Over(FleetError):
    """The fleet is to end; the message says why."""


@dataclass(frozen=True)
class Life:
    """What bounds a fleet's life besides signals.

    It ends with process `parent`, `max_life_s` seconds after it is healthy, and, until then, when
    the other end of the pipe `starter` closes.
    """

    max_life_s: float
    parent: int | None = None
    starter: int | None = None


class Keeper:
    """Runs in a process of its own, or in the foreground of a script."""

    def __init__(self, fleet: EngineFleet, state: State, lock: int, life: Life) -> None:
        self._fleet = fleet
        self._state = state
        self._lock = lock
        self._life = life
        self._ends_s = inf
        self._parent = _open_process(life.parent)
        self._starter = life.starter
        self._memory = SharedMemoryWatch()
        self._lost: set[str] = set()

    def run(self, ready: Callable[[dict[str, Any]], None]) -> str:
        """Start, call `ready` with what runs, keep it, end it; why it ended. Raises FleetError."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, _over)
        adopt_orphans()
        try:
            self._state.write({**self._fleet.describe(), **self._about(), "ready": False})
            self._fleet.start(self._pause, [self._lock])
            self._starter = None
            self._ends_s = time.monotonic() + self._life.max_life_s
            about = {**self._fleet.describe(), **self._about(), "ready": True}
            self._state.write(about)
            ready(about)
            while True:
                self._pause(_LOOK_S)
                self._look()
        except Over as over:
            return str(over)
        finally:
            self._end()

    def _about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "pid_started": identity(os.getpid()),
            "state": str(self._state.path),
            "logs": str(self._state.logs),
            "ends_at": None if isinf(self._ends_s) else time.time() + self._life.max_life_s,
            "parent": self._life.parent,
        }

    def _pause(self, seconds: float) -> None:
        """Wait, but not past the end of this life. Raises Over."""
        until_s = min(time.monotonic() + seconds, self._ends_s)
        watched = [fd for fd in (self._parent, self._starter, self._memory.fd) if fd is not None]
        while (left_s := until_s - time.monotonic()) > 0:
            ready = select.select(watched, [], [], left_s)[0]
            if self._parent in ready:
                raise Over(f"process {self._life.parent} has ended")
            if self._starter in ready:
                raise Over("the process that was waiting for it has ended")
            if self._memory.fd in ready:
                self._memory.note()
        if until_s >= self._ends_s:
            raise Over(f"its {self._life.max_life_s:.0f} s are over")

    def _look(self) -> None:
        """Say once of each process that it has died; over when none is left."""
        processes = self._fleet.processes
        for process in processes:
            if process.ended and process.name not in self._lost:
                self._lost.add(process.name)
                print(f"engine: {process.name} has died:\n{process.log_tail()}", file=sys.stderr)
        if self._lost:
            # Where a supervisor and its guard were killed both, this process has inherited.
            kill_adopted([process.pid for process in processes if process.pid])
        if len(self._lost) == len(processes):
            raise Over("all its processes have died")

    def _end(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        self._memory.note()
        try:
            self._fleet.stop()
        finally:
            kill_descendants(None)
            self._memory.remove()
            self._state.remove()


def _over(signum: int, _frame: object) -> None:
    raise Over(f"told to by {signal.Signals(signum).name}")


def _open_process(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise Over(f"process {pid} has ended") from None
