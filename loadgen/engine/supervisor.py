"""Run a command so that nothing of it outlives the process that asked for it.

    python supervisor.py COMMAND...

Ends the command and everything it started when standard input closes, which the kernel does
however the parent died, or on SIGTERM: first SIGTERM to the command, then SIGKILL to all of its
descendants, also those that left its process group. The line `kill` skips the SIGTERM. The
command gets a temporary folder (TMPDIR) that is removed at the end. Exits with the command's
status, or 128 + the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRACE_S = 10.0
TRACKER_GRACE_S = 3.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)


def set_process_option(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def watch(child: subprocess.Popen[bytes]) -> bool:
    """Wait for the command's end or an order to end it; True when it may have its grace."""
    ended = os.pidfd_open(child.pid)
    try:
        while True:
            ready, _, _ = select.select([0, ended], [], [])
            if ended in ready:
                return False
            order = os.read(0, 4096)
            if not order:
                return True
            if b"kill\n" in order:
                return False
    finally:
        os.close(ended)


def end(child: subprocess.Popen[bytes], gently: bool) -> None:
    if gently and child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            print("supervisor: SIGTERM was not enough", file=sys.stderr)
    # Being the subreaper, this process inherits every orphan below it: when the kernel says that
    # it has no children, nothing is left.
    began_s = time.monotonic()
    while reap(child):
        waited_s = time.monotonic() - began_s
        if waited_s > GRACE_S:
            raise TimeoutError(f"processes {list(descendants(os.getpid()))} do not die")
        for pid in descendants(os.getpid()):
            if waited_s > TRACKER_GRACE_S or not is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def is_resource_tracker(pid: int) -> bool:
    """Python's helper that unlinks shared memory once all its users are gone, and then ends."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def descendants(root: int) -> list[int]:
    """The processes below `root`; one whose parent is just dying may be overlooked."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        below.setdefault(int(parent), []).append(int(stat.parent.name))
    found = below.get(root, [])
    for pid in found:
        found += below.get(pid, [])
    return found


def reap(child: subprocess.Popen[bytes]) -> bool:
    """Collect what has died, the command through its Popen; whether any child is left."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None:
            return True
        if ended.si_pid == child.pid:
            child.wait()
        else:
            os.waitpid(ended.si_pid, 0)


def main(command: list[str]) -> int:
    def stop(_signum: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="kvroute-engine-") as scratch:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
            # For the one case this process cannot handle: its own SIGKILL.
            preexec_fn=lambda: set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        gently = True
        try:
            gently = watch(child)
        finally:
            end(child, gently)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
