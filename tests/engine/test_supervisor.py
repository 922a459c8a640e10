"""Nothing that the supervisor starts survives, whichever way the end comes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import pytest

from tests.engine.replica import SUPERVISOR

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
SHARED = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


def supervised(program: str) -> list[str]:
    return [sys.executable, str(SUPERVISOR), sys.executable, "-c", program]


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
    with started(supervised(FAMILY)) as (supervisor, line):
        grandchild = os.pidfd_open(int(line))
        supervisor.communicate(order, timeout=DEADLINE_S)
        assert_ends(grandchild)
        assert supervisor.returncode == 128 + (signal.SIGKILL if order else signal.SIGTERM)


def test_a_killed_parent_takes_the_family_with_it() -> None:
    parent = f"""
import subprocess
middle = subprocess.Popen({supervised(FAMILY)!r}, stdin=subprocess.PIPE)
middle.wait()
"""
    with started([sys.executable, "-c", parent]) as (process, line):
        grandchild = os.pidfd_open(int(line))
        process.send_signal(signal.SIGKILL)
        assert_ends(grandchild)


def test_a_killed_command_leaves_no_shared_memory() -> None:
    with started(supervised(SHARED)) as (supervisor, name):
        SharedMemory(name).close()
        supervisor.communicate(b"kill\n", timeout=DEADLINE_S)
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


def test_the_status_of_the_command_is_passed_on() -> None:
    with started(supervised("raise SystemExit(7)")) as (supervisor, _):
        assert supervisor.wait(DEADLINE_S) == 7
