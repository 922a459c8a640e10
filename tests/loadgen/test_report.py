from dataclasses import replace
from functools import cache
from io import StringIO
from math import nan

import orjson
import pytest
from rich.console import Console

from loadgen.demo import report
from loadgen.demo.experiment import Measured, Prepared, prepare
from loadgen.demo.settings import DemoSettings
from loadgen.stats import Reuse, Summary

ROW = Summary(
    ttft_mean_s=0.4,
    ttft_p50_s=0.3,
    ttft_p99_s=1.7654,
    cached_fraction=0.54,
    hotspot=1.0,
    requests=300,
    errors=0,
    error_kinds={},
    itl_p50_s=0.01,
    itl_p99_s=0.02,
    prompt_tokens=1000,
    completion_tokens=100,
)
REUSE = Reuse(1000, 540, 540, 0, 0, 1.0)


@cache
def prepared() -> Prepared:
    made = prepare(DemoSettings(duration_s=1.0))
    return replace(made, bound=replace(ROW, ttft_mean_s=0.1, cached_fraction=0.86))


def measured(**rows: Summary) -> dict[str, Measured]:
    return {name: Measured(row, 20.0, 0.01, True, REUSE) for name, row in rows.items()}


BOTH = measured(round_robin=ROW, cost=replace(ROW, ttft_mean_s=0.13, cached_fraction=0.85))


def shown(rows) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(report.table(prepared(), rows))
    return "\n".join(line.strip() for line in console.file.getvalue().splitlines())


def test_the_table_has_a_line_per_policy_that_fits_a_terminal():
    lines = shown(BOTH).splitlines()
    [line] = [line.split() for line in lines if line.startswith("round_robin")]
    assert " ".join(line) == "round_robin 400 ms 300 ms 1,765 ms 54.0% 25.0% 300 0"
    assert sum(line.startswith(("round_robin", "cost", "oracle")) for line in lines) == 3
    assert max(map(len, lines)) < 80


def test_a_policy_without_a_whole_answer_has_no_times():
    rows = measured(cost=replace(ROW, ttft_mean_s=nan, ttft_p50_s=nan, ttft_p99_s=nan, errors=300))
    [line] = [line for line in shown(rows).splitlines() if line.startswith("cost")]
    assert line.split()[1:4] == ["-", "-", "-"]
    assert report.as_json(prepared(), rows)["policies"]["cost"]["ttft_mean_s"] is None


def test_the_sentence_says_what_was_gained():
    text = report.sentence(prepared(), BOTH)
    assert "130 ms" in text and "400 ms" in text and "3.1 times" in text
    assert "85%" in text and "54%" in text and "90% of what the oracle gains" in text


def test_the_sentence_does_not_compare_runs_with_errors():
    rows = BOTH | measured(cost=replace(ROW, errors=7))
    text = report.sentence(prepared(), rows)
    assert "7 under cost" in text and "ms" not in text


def test_the_sentence_needs_both_policies():
    assert "together" in report.sentence(prepared(), measured(cost=ROW))


@pytest.mark.parametrize(
    ("choice_s", "bound_s", "won"),
    [(0.1, 0.1, 1.0), (0.4, 0.1, 0.0), (0.5, 0.1, -1 / 3), (0.05, 0.1, 7 / 6), (0.3, 0.37, None)],
)
def test_gap_recovered_is_not_clipped_and_needs_a_gap(choice_s, bound_s, won):
    found = report.gap_recovered(
        ROW, replace(ROW, ttft_mean_s=choice_s), replace(ROW, ttft_mean_s=bound_s)
    )
    assert found == (None if won is None else pytest.approx(won))


def test_a_late_client_is_called_out():
    assert report.warning(BOTH) is None
    late = BOTH | {"cost": Measured(ROW, 20.0, 0.4, False, REUSE)}
    assert "cost (400 ms)" in report.warning(late)
    assert report.as_json(prepared(), late)["valid"] is False


def test_the_json_has_the_promised_shape():
    result = orjson.loads(orjson.dumps(report.as_json(prepared(), BOTH)))
    assert result["working_set_over_cache"] == pytest.approx(prepared().working_set_over_cache)
    assert list(result["policies"]) == ["round_robin", "cost", "oracle"]
    promised = {
        "ttft_mean_s",
        "ttft_p50_s",
        "ttft_p99_s",
        "cached_fraction",
        "hotspot",
        "requests",
        "errors",
    }
    assert all(promised <= row.keys() for row in result["policies"].values())
    assert result["gap_recovered"] == pytest.approx(0.9)
    assert result["settings"]["seed"] == 1


def test_the_sentence_names_a_policy_that_was_faster():
    rows = BOTH | measured(least_load=replace(ROW, ttft_mean_s=0.12))
    text = report.sentence(prepared(), rows)
    assert text.endswith("Here least_load was faster still: 120 ms.")
    assert "faster still" not in report.sentence(prepared(), BOTH)
