"""Run a command so that nothing of it outlives the process that asked for it.

Ends the command and everything it started when standard input closes, which the kernel does
however the parent died, or on SIGTERM: first SIGTERM to the command, then SIGKILL to all of its
descendants, also those that left its process group. The line `kill` skips the SIGTERM. The
command gets a temporary folder (TMPDIR) that is removed at the end, and so is what it left in
/dev/shm. Exits with the command's status, or 128 + the signal that ended it.

Two processes do this, a supervisor and a guard above it, so that either may be killed. What they
import is the standard library's and `shared_memory`: they are started without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from loadgen.engine.shared_memory import SharedMemoryWatch, descendants

SCRATCH_PREFIX = "kvroute-engine-"
GRACE_S = 10.0
TRACKER_GRACE_S = 3.0
# Longer than a supervisor that is orderly needs for its end.
GUARD_GRACE_S = 2 * GRACE_S + 5.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)
_PACKAGES = str(Path(__file__).resolve().parents[2])
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from loadgen.engine.supervisor import main
sys.exit(main(sys.argv[2], sys.argv[3], sys.argv[4:]))
"""


def supervised(
    command: Sequence[str], scratch: Path | None = None, remove: Path | None = None
) -> list[str]:
    """The command line that runs `command` so; start it with stdin=PIPE and keep that open.

    `scratch` is an existing folder to be the temporary one, for who wants to know it. `remove` is
    a folder to be removed when the end is ordered or the parent has died, but not when the command
    ends by itself: its log may be in there.
    """
    folders = [str(folder) if folder else "" for folder in (scratch, remove)]
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, _PACKAGES, *folders, *command]


def set_process_option(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """From now on, what loses its parent below this process becomes its child."""
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)


def end(child: subprocess.Popen[bytes], gently: bool) -> None:
    """End the command, then everything else below this process."""
    if gently and child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            print("supervisor: SIGTERM was not enough", file=sys.stderr)
    kill_descendants(child)


def kill_descendants(child: subprocess.Popen[bytes] | None) -> None:
    """SIGKILL until nothing is left below this process.

    Being the subreaper, it inherits every orphan: when the kernel says that it has no children,
    nothing is left.
    """
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


def kill_adopted(children: Collection[int]) -> None:
    """SIGKILL to what lost its parent below this process and is not below one of `children`."""
    own = set(children)
    own |= {pid for child in children for pid in descendants(child)}
    for pid in descendants(os.getpid()):
        if pid not in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def is_resource_tracker(pid: int) -> bool:
    """Python's helper that unlinks shared memory once all its users are gone, and then ends."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def reap(child: subprocess.Popen[bytes] | None) -> bool:
    """Collect what has died, the command through its Popen; whether any child is left."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None:
            return True
        if child is not None and ended.si_pid == child.pid:
            child.wait()
        else:
            os.waitpid(ended.si_pid, 0)


def stop(_signum: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def watch(child: subprocess.Popen[bytes], guarded: int, memory: SharedMemoryWatch) -> bool:
    """Wait for the command's end or an order to end it; True when it may have its grace."""
    ended = os.pidfd_open(child.pid)
    try:
        while True:
            ready, _, _ = select.select([0, ended, guarded, memory.fd], [], [])
            if memory.fd in ready:
                memory.note()
            if ended in ready:
                return False
            if guarded in ready:
                return True
            if 0 in ready:
                order = os.read(0, 4096)
                if not order or b"kill\n" in order:
                    return not order
    finally:
        os.close(ended)


def supervise(command: list[str], remove: str, scratch: str, guarded: int) -> int:
    """Run the command until its end; `guarded` becomes readable when the guard is gone."""
    adopt_orphans()
    memory = SharedMemoryWatch()
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
        gently = watch(child, guarded, memory)
    finally:
        memory.note()
        end(child, gently)
        memory.remove()
        shutil.rmtree(scratch, ignore_errors=True)
        if gently and remove:
            shutil.rmtree(remove, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def stand_guard(supervisor: int, memory: SharedMemoryWatch, limit_s: float | None) -> int | None:
    """Wait for the supervisor's end; its exit status, 128 + the signal that ended it, or None."""
    ended = os.pidfd_open(supervisor)
    while ready := select.select([ended, memory.fd], [], [], limit_s)[0]:
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
            return code if code >= 0 else 128 - code
        memory.note()
    return None


def guard(supervisor: int, hold: int, scratch: str, memory: SharedMemoryWatch) -> int:
    """See the supervisor through; closing `hold` tells it to end."""
    # Orders are for the supervisor alone.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status: int | None = 128 + signal.SIGTERM
    try:
        status = stand_guard(supervisor, memory, None)
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(hold)
        status = stand_guard(supervisor, memory, GUARD_GRACE_S)
    finally:
        memory.note()
        kill_descendants(None)
        memory.remove()
        shutil.rmtree(scratch, ignore_errors=True)
    return 128 + signal.SIGKILL if status is None else status


def main(scratch: str, remove: str, command: list[str]) -> int:
    """Run the command to its end; its exit status."""
    signal.signal(signal.SIGTERM, stop)
    # What a terminal sends to all at once is for the parent, whose end is seen here anyway.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    adopt_orphans()
    scratch = scratch or tempfile.mkdtemp(prefix=SCRATCH_PREFIX)
    memory = SharedMemoryWatch()
    watched, hold = os.pipe()
    supervisor = os.fork()
    if not supervisor:
        os.close(hold)
        return supervise(command, remove, scratch, watched)
    os.close(watched)
    return guard(supervisor, hold, scratch, memory)
