from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.outcome import Outcome
from loadgen.stats import quantile, summarise


def outcome(ttft_s=0.5, replica="a", error=None, prompt=100, cached=40) -> Outcome:
    return Outcome(
        session=0,
        turn=0,
        due_s=10.0,
        sent_s=10.1,
        first_token_s=None if error else 10.0 + ttft_s,
        done_s=12.0,
        gaps_s=[0.01, 0.03],
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=3,
        replica=replica,
        error=error,
    )


def test_a_row():
    outcomes = [outcome(0.1), outcome(0.2), outcome(0.9, replica="b"), outcome(error="timeout")]
    row = summarise(outcomes, replicas=4)
    assert row.ttft_mean_s == pytest.approx(0.4)
    assert (row.ttft_p50_s, row.ttft_p99_s) == (pytest.approx(0.2), pytest.approx(0.9))
    assert row.cached_fraction == pytest.approx(0.4)
    assert row.hotspot == pytest.approx(4 * 2 / 3)
    assert (row.requests, row.errors, row.error_kinds) == (4, 1, {"timeout": 1})
    assert (row.itl_p50_s, row.itl_p99_s) == (0.01, 0.03)
    assert (row.prompt_tokens, row.completion_tokens) == (300, 9)


def test_ttft_counts_from_when_the_request_was_due():
    assert outcome(0.5).ttft_s == pytest.approx(0.5)
    assert outcome(0.5).lag_s == pytest.approx(0.1)


def test_nothing_succeeded():
    row = summarise([outcome(error="connect")], replicas=4)
    assert isnan(row.ttft_mean_s) and isnan(row.ttft_p99_s)
    assert (row.cached_fraction, row.hotspot, row.errors) == (0, 0, 1)


def test_no_outcomes_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        summarise([], replicas=4)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_value_with_that_share_at_or_below(values, q):
    value = quantile(values, q)
    assert value in values
    assert sum(other <= value for other in values) >= q * len(values) - 1e-6
    assert sum(other < value for other in values) < q * len(values) + 1e-6
