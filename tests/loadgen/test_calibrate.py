"""`loadgen calibrate`: constants from times, and what it refuses to take for a measurement."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.calibrate.fit import Decode, Prefill, Timing, fit, worst_error
from loadgen.calibrate.probes import Plan, Probes
from loadgen.errors import CalibrationError
from loadgen.outcome import Outcome
from loadgen.replica.calibration import TIMES, read_calibration
from loadgen.replica.errors import ReplicaError
from loadgen.replica.model import EngineModel

SIZES = [(64, 0), (500, 0), (1000, 0), (2000, 0), (32, 468), (30, 1970), (500, 500)]
times_s = st.floats(0, 1e-2, allow_subnormal=False).map(
    lambda value: 0.0 if value < 1e-7 else value
)


def prefills(timing: Timing) -> list[Prefill]:
    return [Prefill(new, cached, timing.ttft_s(new, cached)) for new, cached in SIZES]


def decodes(timing: Timing) -> list[Decode]:
    step_s, each_s = timing.decode_step_s, timing.decode_per_request_s
    return [Decode(batch, step_s + each_s * batch) for batch in (1, 2, 4)]


@settings(max_examples=100, deadline=None)
@given(st.tuples(st.floats(1e-3, 0.2), times_s, times_s.map(lambda t: t / 1e4), times_s, times_s))
def test_what_was_made_by_a_timing_is_found_again(
    made: tuple[float, float, float, float, float],
) -> None:
    timing = Timing(made[0], made[1], made[2], made[3], 0.01, made[4])
    found = fit(prefills(timing), decodes(timing))
    assert worst_error(found, prefills(timing)) < 0.02
    assert [step_s for _, step_s in decodes(found)] == pytest.approx(
        [step_s for _, step_s in decodes(timing)], rel=1e-3
    )


def test_noise_makes_no_constant_negative() -> None:
    random = Random(1)
    timing = Timing(0.01, 1e-4, 0.0, 0.0, 0.02, 0.0)
    noisy = [Prefill(n, m, t * random.uniform(0.9, 1.1)) for n, m, t in prefills(timing)]
    gaps = [Decode(batch, gap_s * random.uniform(0.9, 1.1)) for batch, gap_s in decodes(timing)]
    found = fit(noisy, gaps)
    assert all(value >= 0 for value in found.json().values())
    assert worst_error(found, noisy) < 0.15


def test_a_fit_has_the_engines_own_formula() -> None:
    timing = Timing(0.02, 2e-3, 1e-7, 1e-5, 0.03, 0.004)
    engine = EngineModel(**timing.json())
    for new, cached in SIZES:
        said_s = engine.prefill_s(new, cached, first=True)
        assert timing.ttft_s(new, cached) == pytest.approx(said_s)
    assert engine.decode_s(3) == pytest.approx(0.042)


def test_no_times_fit_nothing() -> None:
    with pytest.raises(CalibrationError, match="prompts"):
        fit([], [Decode(1, 0.1)])


class Scripted:
    """A replica of a timing, with a cache that the test decides about, on a clock of its own."""

    def __init__(self, timing: Timing, cached: Any) -> None:
        self.timing = timing
        self.cached = cached
        self.now_s = 0.0
        self.seen: list[str] = []

    def clock(self) -> float:
        return self.now_s

    async def send(self, request: Any, outcome: Outcome) -> Outcome:
        prompt = len(request.prompt) // 4
        outcome.prompt_tokens = prompt
        outcome.cached_tokens = self.cached(self.seen, request.prompt)
        self.seen.append(request.prompt)
        new = prompt - outcome.cached_tokens
        outcome.due_s = self.now_s
        self.now_s += self.timing.ttft_s(new, outcome.cached_tokens)
        outcome.first_token_s = self.now_s
        outcome.gaps_s = [self.timing.decode_step_s] * (request.max_tokens - 1)
        outcome.done_s = self.now_s
        return outcome


def shared(seen: list[str], prompt: str) -> int:
    """Cached as an engine with blocks of 16 tokens would have it."""
    most = 0
    for before in seen:
        same = next((i for i, (a, b) in enumerate(zip(before, prompt)) if a != b), len(prompt))  # noqa: B905
        most = max(most, min(same, len(prompt) - 4) // 64 * 16)
    return most


TIMING = Timing(0.05, 2e-3, 1e-7, 0.0, 0.03, 0.0)


async def measured(replica: Scripted, budget_s: float = 90.0) -> Any:
    return await Probes(replica, Plan(2048, budget_s), 1, clock=replica.clock).measure()


async def test_probes_find_the_timing_of_a_replica() -> None:
    replica = Scripted(TIMING, shared)
    found = await measured(replica)
    assert not found.cut_short
    assert worst_error(TIMING, found.prefills) < 1e-6
    assert {cached > 0 for _, cached, _ in found.prefills} == {True, False}
    assert max(new for new, _, _ in found.prefills) > 1500
    assert replica.now_s < 90


async def test_a_slow_replica_is_asked_for_less() -> None:
    replica = Scripted(Timing(0.5, 2e-2, 0.0, 0.0, 0.03, 0.0), shared)
    found = await measured(replica)
    assert max(new for new, _, _ in found.prefills) < 1000
    assert replica.now_s < 130


async def test_a_prompt_that_was_cached_is_no_cold_run() -> None:
    with pytest.raises(CalibrationError, match="no cold run"):
        await measured(Scripted(TIMING, lambda seen, prompt: 16))


async def test_a_replica_that_does_not_tell_what_it_cached_is_not_measured() -> None:
    with pytest.raises(CalibrationError, match="enable-prompt-tokens-details"):
        await measured(Scripted(TIMING, lambda seen, prompt: 0))


@contextmanager
def simulated(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "loadgen.replica", "--exit-on-stdin-eof", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], 30)
        assert readable
        yield json.loads(process.stdout.readline())["replicas"][0]["url"]
    finally:
        process.communicate(timeout=30)


async def run(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadgen.cli",
        "calibrate",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_the_command_writes_what_a_replica_takes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    with simulated("--prefill-a", "0.0001") as url:
        status, out, err = await run(url, "--quick", "--longest=512", "--out", str(path), "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads(path.read_text())
    assert set(read_calibration(path)) == set(TIMES)
    with simulated("--calibration", str(path)) as url:
        assert url


async def test_a_server_that_is_not_there_is_named() -> None:
    status, _, err = await run("http://127.0.0.1:9", "--quick")
    assert status == 1
    assert err.startswith("loadgen calibrate: http://127.0.0.1:9/v1/models")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"timing": {}}', json.dumps({"timing": dict.fromkeys(TIMES, -1)})]
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ReplicaError, match="calibration"):
        read_calibration(path)
