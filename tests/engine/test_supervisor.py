"""Nothing that the supervisor starts survives, whichever way the end comes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from loadgen.engine.supervisor import supervised

DEADLINE_S = 15.0
# A stubborn process in a session of its own, under one that goes on SIGTERM.
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
FAMILY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE,
                         start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
# Two segments, one of which Python's own helper does not know of, as engines in C++ make them.
SHARED = """
import os, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
bare = os.open(f"/dev/shm/{memory.name}_bare", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(bare, 4096)
print(memory.name, flush=True)
time.sleep(600)
"""
BOTH = f"""
import subprocess, sys
programs = [{SHARED!r}, {STUBBORN!r}]
started = [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE,
                            start_new_session=True) for each in programs]
lines = [each.stdout.readline().decode().strip() for each in started]
print(lines[0], started[1].pid, flush=True)
started[0].wait()
"""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and the first line it printed."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def assert_ends(pidfd: int) -> None:
    try:
        ended, _, _ = select.select([pidfd], [], [], DEADLINE_S)
        assert ended, "the process still runs"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("order", [b"", b"kill\n"])
def test_closing_or_ordering_ends_the_whole_family(order: bytes) -> None:
    with started(supervised(python(FAMILY))) as (supervisor, line):
        grandchild = os.pidfd_open(int(line))
        supervisor.communicate(order, timeout=DEADLINE_S)
        assert_ends(grandchild)
        assert supervisor.returncode == 128 + (signal.SIGKILL if order else signal.SIGTERM)


PARENT = f"""
import os, subprocess
os.setsid()
middle = subprocess.Popen({supervised(python(BOTH))!r}, stdin=subprocess.PIPE)
middle.wait()
"""


@pytest.mark.parametrize(
    ("signum", "all_of_them"),
    [(signal.SIGKILL, False), (signal.SIGHUP, True), (signal.SIGQUIT, True)],
)
def test_an_ended_parent_takes_the_family_with_it(
    signum: signal.Signals, all_of_them: bool
) -> None:
    """Killed alone, or with all that a terminal reaches when it closes."""
    with started(python(PARENT)) as (process, line):
        name, pid = line.split()
        grandchild = os.pidfd_open(int(pid))
        (os.killpg if all_of_them else os.kill)(process.pid, signum)
        assert_ends(grandchild)
        assert_no_shared_memory(name)


def below(pid: int) -> int:
    """The one child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def assert_no_shared_memory(name: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while left := [path.name for path in Path("/dev/shm").glob(f"{name}*")]:
        assert time.monotonic() < until_s, left
        time.sleep(0.05)


def test_a_killed_command_leaves_no_shared_memory() -> None:
    with started(supervised(python(SHARED))) as (supervisor, name):
        SharedMemory(name).close()
        supervisor.communicate(b"kill\n", timeout=DEADLINE_S)
        assert_no_shared_memory(name)


@pytest.mark.parametrize("victim", ["guard", "supervisor", "command"])
def test_whoever_is_killed_nothing_is_left(victim: str) -> None:
    """The family, its segments in /dev/shm, and its temporary folder."""
    with started(supervised(python(BOTH))) as (guard, line):
        name, grandchild = line.split()
        ended = os.pidfd_open(int(grandchild))
        supervisor = below(guard.pid)
        command = below(supervisor)
        environment = Path(f"/proc/{grandchild}/environ").read_text().split("\0")
        scratch = next(each for each in environment if each.startswith("TMPDIR="))
        folder = Path(scratch.removeprefix("TMPDIR="))
        assert folder.is_dir()
        with removed_with_its_folder(folder, supervisor):
            os.kill({"guard": guard.pid, "supervisor": supervisor}.get(victim, command), 9)
            assert_ends(ended)
        assert_no_shared_memory(name)


@contextlib.contextmanager
def removed_with_its_folder(folder: Path, supervisor: int) -> Iterator[None]:
    left = os.pidfd_open(supervisor)
    yield
    assert_ends(left)
    until_s = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < until_s, f"{folder} is left"
        time.sleep(0.05)


BARE = """
import mmap, os, sys, time
others = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
path = f"/dev/shm/kvroute-test-{os.getpid()}"
file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
os.close(file)
print(path, flush=True)
time.sleep(600)
"""


def test_segments_of_others_stay() -> None:
    """Also one that the command opens, and one that took the place of the command's own."""
    with started(python(BARE)) as (_, strangers):
        with started(supervised(python(BARE, strangers))) as (supervisor, line):
            own = Path(line)
            assert own.exists()
            own.unlink()
            own.touch()
            supervisor.communicate(b"kill\n", timeout=DEADLINE_S)
        left = [Path(strangers), own]
        assert [path for path in left if path.exists()] == left
        for path in left:
            path.unlink()


def test_the_status_of_the_command_is_passed_on() -> None:
    with started(supervised(python("raise SystemExit(7)"))) as (supervisor, _):
        assert supervisor.wait(DEADLINE_S) == 7
