"""What runs, written down for who asks later: a state file and a lock beside it.

The lock is held by the keeper of a fleet and by the supervision of each of its processes, so it is
free only once nothing of the fleet is left, whoever was killed. A process id alone proves nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loadgen.engine.install import engine_folder

_POLL_S = 0.1
_LOOKERS_S = 1.0


@dataclass(frozen=True)
class State:
    """`path` is the state file; lock and logs lie beside it."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path.with_suffix(".logs")

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """The lock's file descriptor, or None while something of a fleet is left."""
        deadline_s = time.monotonic() + _LOOKERS_S
        with self._open_lock() as file:
            # A shared lock of somebody who is just looking is no fleet.
            while not (held := _lock(file, fcntl.LOCK_EX)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            yield file.fileno() if held else None

    def is_free(self) -> bool:
        """Whether nothing of a fleet is left."""
        with self._open_lock() as file:
            return _lock(file, fcntl.LOCK_SH)

    def _open_lock(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_suffix(".lock").open("w")

    def wait_free(self, deadline_s: float) -> bool:
        """`deadline_s` is on time.monotonic()'s clock."""
        while not (free := self.is_free()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return free

    def read(self) -> dict[str, Any] | None:
        """What was written last; None if there is nothing."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, values: dict[str, Any]) -> None:
        fresh = self.path.with_suffix(".partial")
        fresh.write_text(json.dumps(values, indent=2) + "\n")
        fresh.rename(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def default_state() -> State:
    """In the folder of the engine."""
    return State(engine_folder() / "run" / "state.json")


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def identity(pid: int) -> str | None:
    """What tells this process from a later one of the same id; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def terminate(pid: int, known_as: str) -> bool:
    """SIGTERM to the process if it is still that one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # The open pidfd keeps the id from being given to another between look and signal.
        handle = os.pidfd_open(pid)
        try:
            if identity(pid) == known_as:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                return True
        finally:
            os.close(handle)
    return False
