"""Children, and the embedded server, end with their parent whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_index.embedded import EmbeddedServer
from cache_index.lifeline import spawn

PRINT_PID = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PRINT_PID

SPAWNING_PARENT = """
import sys, time
from pathlib import Path
from cache_index.lifeline import spawn
spawn([sys.executable, "-S", "-c", sys.argv[2]], remove=Path(sys.argv[1]))
time.sleep(60)
"""

EMBEDDING_PARENT = """
import asyncio
from cache_index.embedded import EmbeddedServer
async def main():
    server = EmbeddedServer()
    await server.ensure()
    pid = [line for line in (server.folder / "valkey.log").read_text().split() if line][0]
    print(pid.split(":")[0], server.folder, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, check: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("child", [PRINT_PID, STUBBORN], ids=["willing", "stubborn"])
def test_a_child_and_its_folder_go_when_the_parent_is_killed(tmp_path: Path, child: str) -> None:
    folder = tmp_path / "owned"
    folder.mkdir()
    (folder / "file").write_text("x")
    command = [sys.executable, "-c", SPAWNING_PARENT, str(folder), child]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert within(1.0, lambda: not alive(pid) and not folder.exists())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux only")
def test_a_child_goes_when_its_supervisor_is_killed() -> None:
    lifeline = spawn([sys.executable, "-S", "-c", PRINT_PID], stdout=subprocess.PIPE)
    assert lifeline.stdout is not None
    pid = int(lifeline.stdout.readline())
    os.kill(lifeline.pid, signal.SIGKILL)
    assert within(1.0, lambda: not alive(pid))
    lifeline.close()


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("pass", 0)])
def test_a_childs_exit_code_is_passed_on(script: str, code: int) -> None:
    lifeline = spawn([sys.executable, "-S", "-c", script])
    assert within(5.0, lambda: lifeline.poll() is not None)
    assert lifeline.poll() == code
    assert lifeline.close() == code


def test_closing_is_prompt_and_may_be_repeated() -> None:
    lifeline = spawn([sys.executable, "-S", "-c", PRINT_PID], stdout=subprocess.PIPE)
    assert lifeline.stdout is not None
    pid = int(lifeline.stdout.readline())
    started_s = time.monotonic()
    assert lifeline.close() == 128 + signal.SIGTERM
    assert lifeline.close() == 128 + signal.SIGTERM
    assert time.monotonic() - started_s < 1.0
    assert not alive(pid)


def test_the_childs_output_ends_with_it() -> None:
    lifeline = spawn([sys.executable, "-S", "-c", "print('last words')"], stdout=subprocess.PIPE)
    assert lifeline.stdout is not None
    assert lifeline.stdout.read() == b"last words\n"
    lifeline.close()


def test_an_embedded_server_leaves_nothing_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", EMBEDDING_PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid_text, folder_text = parent.stdout.readline().split()
        pid, folder = int(pid_text), Path(folder_text.decode())
        assert alive(pid) and folder.exists()
        parent.kill()
    assert within(1.0, lambda: not alive(pid) and not folder.exists())


async def test_an_embedded_server_starts_again_at_the_same_address() -> None:
    server = EmbeddedServer()
    try:
        await server.ensure()
        first = server.url
        await server.ensure()
        lifeline = server._lifeline
        assert lifeline is not None
        os.kill(lifeline.pid, signal.SIGTERM)
        assert within(2.0, lambda: not server.running)
        await server.ensure()
        assert server.url == first
        assert server.running
    finally:
        await server.close()
    assert not server.folder.exists()
