"""The whole demo as its user runs it: real processes, little traffic."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0


class RunningDemo:
    """`kvroute demo` in an environment by which all its descendants can be told."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.mark = f"DEMO_TEST={uuid.uuid4().hex}"
        self.temp = folder / "temp"
        self.temp.mkdir()
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router.cli", "demo", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {name: value, "TMPDIR": str(self.temp)},
        )

    def descendants(self) -> list[int]:
        """Every process that has this demo's environment, the demo itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.mark.encode() in environ.split(b"\0") and state != "Z":
                found.append(int(entry.name))
        return found

    def left_behind(self) -> tuple[list[int], list[Path]]:
        return self.descendants(), list(self.temp.iterdir())

    def kill_all(self) -> None:
        for pid in self.descendants():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path):
    demos: list[RunningDemo] = []

    def run(*options: str) -> RunningDemo:
        demos.append(RunningDemo(tmp_path, *options))
        return demos[-1]

    yield run
    for demo in demos:
        demo.kill_all()


def until(condition, what: str) -> None:
    """Polls: another process's state is nothing that can be awaited."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def traffic_flows(demo: RunningDemo) -> bool:
    """Demo, two supervisors, replicas, gateway, and the gateway's Valkey with its supervisor."""
    assert demo.process.poll() is None, demo.process.communicate()
    return len(demo.descendants()) >= 7 and any(demo.temp.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_however_it_ends_nothing_is_left(start, number):
    demo = start("--duration=6", "--policies=cost")
    until(lambda: traffic_flows(demo), "the fleet is up")
    demo.process.send_signal(number)
    demo.process.communicate(timeout=DEADLINE_S)
    assert demo.process.returncode == (-9 if number == signal.SIGKILL else 130)
    until(lambda: demo.left_behind() == ([], []), "all processes and files are gone")


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs the printed curl line")
def test_a_short_run_reports_and_keeps_serving(start, tmp_path):
    path = tmp_path / "result.json"
    demo = start(
        "--duration", "1", "--policies", "cost", "--seed", "3", "--json", str(path), "--keep"
    )
    lines = []
    for line in demo.process.stdout:
        lines.append(line)
        if line.startswith("curl "):
            break
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=DEADLINE_S)
    head, _, body = answer.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200") and "x-kvroute-replica:" in head, answer
    assert json.loads(body)["choices"][0]["message"]["content"]

    demo.process.send_signal(signal.SIGINT)
    demo.process.communicate(timeout=DEADLINE_S)
    assert demo.process.returncode == 0
    until(lambda: demo.left_behind() == ([], []), "all processes and files are gone")

    result = json.loads(path.read_text())
    cost, oracle = result["policies"]["cost"], result["policies"]["oracle"]
    assert cost["requests"] == oracle["requests"] == result["workload"]["requests"] > 10
    assert cost["errors"] == 0
    assert cost["prompt_tokens"] == oracle["prompt_tokens"] == result["workload"]["prompt_tokens"]
    assert cost["completion_tokens"] == oracle["completion_tokens"]
    # Both reuse what conversations repeat; the real one has no knowledge the oracle lacks.
    assert 0.3 < cost["cached_fraction"] <= oracle["cached_fraction"] + 0.1
    assert any("cost" in line and "ms" in line for line in lines)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_what_cannot_run_is_said_in_one_line(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("not a trace\n")
    bad = run("--trace", str(trace))
    assert bad.returncode == 1
    assert bad.stderr.startswith("kvroute demo: ") and "trace.jsonl:1" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert run("--json", str(tmp_path / "no" / "such" / "folder.json")).returncode == 2


def test_a_policy_the_gateway_does_not_know_ends_the_demo_with_its_message():
    bad = run("--duration", "1", "--policies", "psychic")
    assert bad.returncode == 1
    assert "no policy 'psychic'" in bad.stderr and "round_robin" in bad.stderr
