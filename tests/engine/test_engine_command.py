"""scripts/engine: what `up` says, and that nothing outlives its end, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadgen.engine.shared_memory import descendants
from tests.engine.install import REPOSITORY
from tests.engine.standin import put_engine

DEADLINE_S = 30.0
SCRIPT = REPOSITORY / "scripts" / "engine"

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Script:
    """scripts/engine over one engine's folder."""

    folder: Path
    temp: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        where = {"KVROUTE_ENGINE_DIR": str(self.folder), "TMPDIR": str(self.temp)}
        return {**os.environ, **where}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def up(self, *arguments: str) -> dict[str, Any]:
        done = self.run("up", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture
def script(tmp_path: Path, short_temp: Path) -> Iterator[Script]:
    put_engine(tmp_path)
    made = Script(tmp_path, short_temp)
    yield made
    assert made.run("down").returncode == 0


@dataclass
class Family:
    """Every process of a fleet, held by pidfd, and their segments in /dev/shm."""

    pidfds: dict[int, int]
    segments: list[Path]

    @classmethod
    def of(cls, keeper: int) -> Family:
        pids = [keeper, *descendants(keeper)]
        paths = [Path(f"/dev/shm/kvroute-test-{pid}") for pid in pids]
        segments = [path for path in paths if path.exists()]
        assert len(pids) > 3 and segments
        return cls({pid: os.pidfd_open(pid) for pid in pids}, segments)

    def assert_gone(self) -> None:
        until_s = time.monotonic() + DEADLINE_S
        for pid, pidfd in self.pidfds.items():
            with contextlib.closing(os.fdopen(pidfd)):
                left_s = max(0.0, until_s - time.monotonic())
                assert select.select([pidfd], [], [], left_s)[0], f"process {pid} still runs"
        while any(path.exists() for path in self.segments):
            assert time.monotonic() < until_s, self.segments
            time.sleep(0.02)


def test_up_tells_where_everything_is_and_down_ends_it(script: Script) -> None:
    about = script.up("--replicas", "2", "--lmcache")
    urls = [replica["url"] for replica in about["replicas"]]
    assert len(set(urls)) == 2
    for url in [*urls, about["pool"]["url"]]:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            assert answer.status == 200
    family = Family.of(about["pid"])
    assert len(family.segments) == 3
    assert script.run("down").returncode == 0
    # At once: `down` waits.
    assert not [path for path in family.segments if path.exists()]
    family.assert_gone()


def test_up_again_tells_what_runs(script: Script) -> None:
    about = script.up("--replicas", "2")
    assert script.up("--replicas", "2") == about
    other = script.run("up", "--replicas", "1")
    assert other.returncode == 1
    assert "2 replicas without LMCache run already" in other.stderr
    table = script.run("status").stdout
    assert all(replica["url"] in table for replica in about["replicas"])
    assert f"--replica {about['replicas'][1]['url']}" in table


def test_nothing_runs(script: Script) -> None:
    assert script.run("status").returncode == 3
    assert script.run("down").returncode == 0
    assert json.loads(script.run("status", "--json").stdout) is None


def test_status_sees_a_replica_that_has_died(script: Script) -> None:
    about = script.up("--replicas", "2")
    assert script.run("status").returncode == 0
    guard = descendants(about["pid"])[0]
    os.kill(guard, 9)
    until_s = time.monotonic() + DEADLINE_S
    while (seen := script.run("status", "--json")).returncode == 0:
        assert time.monotonic() < until_s
    assert seen.returncode == 1
    healthy = [replica["healthy"] for replica in json.loads(seen.stdout)["replicas"]]
    assert sorted(healthy) == [False, True]


def test_a_killed_keeper_takes_everything_with_it(script: Script) -> None:
    family = Family.of(keeper := script.up("--replicas", "2", "--lmcache")["pid"])
    os.kill(keeper, 9)
    family.assert_gone()
    assert script.run("status").returncode == 3
    script.up("--replicas", "1")


def test_a_replica_may_lose_its_supervisor_and_its_guard_at_once(script: Script) -> None:
    """Then nobody watches it, but the keeper has adopted it."""
    about = script.up("--replicas", "2")
    guard = descendants(about["pid"])[0]
    family = Family.of(guard)
    supervisor = descendants(guard)[0]
    os.kill(guard, 9)
    os.kill(supervisor, 9)
    for pidfd in family.pidfds.values():
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
    assert script.run("status").returncode == 1
    script.run("down")
    family.assert_gone()


def test_a_fleet_ends_with_the_process_it_is_bound_to(script: Script) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    family = Family.of(script.up("--parent", str(parent.pid))["pid"])
    parent.kill()
    parent.wait()
    family.assert_gone()


def test_a_fleet_in_the_foreground_ends_with_its_parent(script: Script) -> None:
    program = f"import subprocess; subprocess.run({script.command('up', '--foreground')!r})"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=script.environment, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert b"replica" in parent.stdout.readline()
        family = Family.of(descendants(parent.pid)[0])
        parent.kill()
        family.assert_gone()


def test_a_fleet_does_not_live_for_ever(script: Script) -> None:
    Family.of(script.up("--max-life-s", "5")["pid"]).assert_gone()


@pytest.mark.parametrize("signum", [9, 2])
def test_a_fleet_that_is_still_starting_ends_with_the_one_who_waits(
    tmp_path: Path, short_temp: Path, signum: int
) -> None:
    put_engine(tmp_path, delay_s=600)
    script = Script(tmp_path, short_temp)
    state = tmp_path / "run" / "state.json"
    with subprocess.Popen(script.command("up"), env=script.environment) as waiting:
        until_s = time.monotonic() + DEADLINE_S
        while not (state.exists() and (tmp_path / "run/state.logs/replica-0.log").exists()):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        keeper = json.loads(state.read_text())["pid"]
        while not any(Path(f"/dev/shm/kvroute-test-{pid}").exists() for pid in descendants(keeper)):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        family = Family.of(keeper)
        waiting.send_signal(signum)
        assert waiting.wait(DEADLINE_S) in (-9, 130)
        family.assert_gone()


def test_a_replica_that_does_not_start_is_a_failure_with_its_last_words(
    tmp_path: Path, short_temp: Path
) -> None:
    put_engine(tmp_path, fails=True)
    script = Script(tmp_path, short_temp)
    done = script.run("up")
    assert done.returncode == 1
    assert "replica-0 ended while starting" in done.stderr
    assert "last words of a replica" in done.stderr
    assert "ZMQError: the cause of it all" in done.stderr
    assert script.run("status").returncode == 3


def test_a_missing_engine_is_named_with_the_remedy(tmp_path: Path, short_temp: Path) -> None:
    done = Script(tmp_path, short_temp).run("up")
    assert done.returncode == 1
    assert "run scripts/install-engine" in done.stderr


def test_a_pool_that_does_not_fit_is_refused(script: Script) -> None:
    done = script.run("up", "--lmcache", "--l1-size-gb", "1e9")
    assert done.returncode == 1
    assert "/dev/shm" in done.stderr


def test_a_parent_that_has_ended_is_refused(script: Script) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = script.run("up", "--parent", str(gone.pid))
    assert done.returncode == 1
    assert f"process {gone.pid} has ended" in done.stderr


def test_two_fleets_live_side_by_side(script: Script, tmp_path: Path) -> None:
    other = str(tmp_path / "other" / "fleet.json")
    first = script.up()
    second = script.up("--state", other)
    assert first["pid"] != second["pid"]
    assert script.run("down", "--state", other).returncode == 0
    assert script.run("status").returncode == 0


def test_temporary_files_have_short_names_wherever_the_usual_place_is(
    script: Script, tmp_path: Path
) -> None:
    """vLLM puts sockets there, and a socket's name has room for 107 bytes."""
    deep = tmp_path / "a folder for temporary files with a long name"
    deep.mkdir()
    made = Script(script.folder, deep)
    about = made.up()
    environments = [
        Path(f"/proc/{pid}/environ").read_text() for pid in descendants(about["pid"])[2:]
    ]
    scratches = {e.split("TMPDIR=")[1].split("\0")[0] for e in environments}
    assert max(map(len, scratches)) < 64
    assert not list(deep.iterdir())
