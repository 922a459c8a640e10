"""scripts/engine with real replicas and a real LMCache server: one pool, and nothing left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from loadgen.engine.shared_memory import descendants
from tests.engine.gateway import ask, chat, eventually, prose
from tests.engine.install import REPOSITORY, Engine

pytestmark = pytest.mark.engine

DEADLINE_S = 60.0


def engine_script(*arguments: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / "engine"), *arguments]


def segments(pool: bool) -> set[str]:
    """LMCache's names in /dev/shm: the pool's memory, or replicas' that it reads and writes."""
    pattern = "lmcache_l1_pool_kvroute_*" if pool else "lmcache_kv_*"
    return {path.name for path in Path("/dev/shm").glob(pattern)}


def test_a_prompt_computed_by_one_is_loaded_by_the_other_and_kill_9_leaves_nothing(
    engine: Engine, tmp_path: Path, short_temp: Path
) -> None:
    engine.with_lmcache()
    state = ("--state", str(tmp_path / "state.json"))
    before = segments(pool=True) | segments(pool=False)
    up = subprocess.run(
        engine_script("up", "--replicas", "2", "--lmcache", "--json", *state),
        env={**os.environ, "TMPDIR": str(short_temp)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert up.returncode == 0, up.stderr
    about = json.loads(up.stdout)
    try:
        first, second = (replica["url"] for replica in about["replicas"])
        body = chat(prose("a prompt for the pool", 20), max_tokens=1)
        computed = ask(first, body)
        assert computed.cached == 0
        # The pool stores after the answer; had the second computed it, it would hold it as well.
        assert eventually(lambda: stored_tokens(about) >= computed.most, DEADLINE_S)
        loaded = ask(second, body)
        assert computed.most <= loaded.cached < loaded.prompt

        made = segments(pool=True) | segments(pool=False)
        assert len(made - before) == 3
        everything = [about["pid"], *descendants(about["pid"])]
        worker = next(pid for pid in everything if name(pid) == "VLLM::Worker")
        os.kill(worker, 9)
        assert eventually(lambda: f"lmcache_kv_{worker}_0" not in segments(pool=False), DEADLINE_S)
        os.kill(about["pid"], 9)
        assert eventually(lambda: not (segments(True) | segments(False)) - before, DEADLINE_S)
        assert eventually(lambda: not any(map(runs, everything)), DEADLINE_S)
    finally:
        down = subprocess.run(engine_script("down", *state), capture_output=True, timeout=200)
    assert down.returncode == 0


def stored_tokens(about: dict[str, Any]) -> int:
    """How much of the one prompt the pool can give, without what is still being written."""
    pool = about["pool"]
    with urllib.request.urlopen(f"{pool['url']}/status", timeout=5) as answer:
        stored = json.load(answer)["storage_manager"]["l1_managers"]["_default"]
    readable = stored["total_object_count"] - stored["write_locked_count"]
    return int(readable) * int(pool["chunk_tokens"])


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
    except OSError:
        return ""


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
