"""Child processes that cannot outlive their parent.

`kill -9` gives a parent no chance to clean up, so a small supervisor stands between it and the
child: the supervisor's stdin is a pipe whose other end only the parent has. However the parent
ends, the pipe closes; the supervisor then ends the child and removes its folder. On Linux the child
also asks the kernel to be killed with the supervisor, should someone kill that one.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["Lifeline", "spawn", "supervised"]

# Run with -S: no site-packages, so it starts in a few ms and stays small. It leads a session of its
# own, because a Ctrl-C in the terminal is the parent's to handle, and ends the child's whole group.
_SUPERVISOR = r"""
import ctypes, os, shutil, signal, subprocess, sys, threading
grace_s, folder, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
signal.signal(signal.SIGINT, signal.SIG_IGN)
libc = ctypes.CDLL(None) if sys.platform == "linux" else None
def die_with_supervisor():
    libc.prctl(1, signal.SIGKILL)
child = subprocess.Popen(
    command, stdin=subprocess.DEVNULL, start_new_session=True,
    preexec_fn=die_with_supervisor if libc else None,
)
for descriptor in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
over = threading.Event()
def watch_parent():
    while os.read(0, 4096):
        pass
    over.set()
def watch_child():
    child.wait()
    over.set()
signal.signal(signal.SIGTERM, lambda *_: over.set())
for watch in (watch_parent, watch_child):
    threading.Thread(target=watch, daemon=True).start()
over.wait()
if child.poll() is None:
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
try:
    os.killpg(child.pid, signal.SIGKILL)
except (ProcessLookupError, PermissionError):
    pass
code = child.wait()
if folder:
    shutil.rmtree(folder, ignore_errors=True)
os._exit(code if code >= 0 else 128 - code)
"""


def supervised(
    command: Sequence[str], *, remove: Path | None = None, grace_s: float = 0.5
) -> list[str]:
    """The command line that runs `command` under a supervisor.

    Start it with `stdin=PIPE` and keep that pipe open: closing it ends the child. `remove` is
    deleted once the child has gone. `grace_s` lies between SIGTERM and SIGKILL. The child's stdout
    and stderr are those given to the supervisor, which writes nothing itself.
    """
    folder = str(remove) if remove else ""
    return [sys.executable, "-S", "-c", _SUPERVISOR, str(grace_s), folder, *command]


class Lifeline:
    """A running supervised child."""

    def __init__(self, process: subprocess.Popen[bytes], grace_s: float) -> None:
        self._process = process
        self._grace_s = grace_s

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        return self._process.stderr

    def poll(self) -> int | None:
        """The child's exit code once it and its folder are gone, 128+n after signal n."""
        return self._process.poll()

    def close(self) -> int:
        """End the child and wait until nothing of it is left. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            return self._process.wait(self._grace_s + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(5.0)
        finally:
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()


def spawn(
    command: Sequence[str],
    *,
    remove: Path | None = None,
    grace_s: float = 0.5,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Lifeline:
    """Start `command` so that it dies with this process, whatever kills it."""
    process = subprocess.Popen(
        supervised(command, remove=remove, grace_s=grace_s),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=dict(env) if env is not None else None,
        cwd=cwd,
        start_new_session=True,
    )
    return Lifeline(process, grace_s)
