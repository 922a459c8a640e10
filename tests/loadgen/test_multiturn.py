from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import WorkloadError
from loadgen.workload import MultiturnSettings, multiturn
from loadgen.workload.text import prose

SMALL = MultiturnSettings(sessions=8, system_chars=200, system_prompts=3, user_chars=(20, 60))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_same_seed_same_traffic_and_another_seed_other_traffic(seed):
    assert multiturn(SMALL, seed) == multiturn(SMALL, seed)
    assert multiturn(SMALL, seed) != multiturn(SMALL, seed + 1)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_sizes_keep_to_the_settings(seed):
    workload = multiturn(SMALL, seed)
    assert len(workload.sessions) == 8
    assert workload.requests == sum(len(session.turns) for session in workload.sessions)
    for session in workload.sessions:
        assert len(session.system) == 200
        assert 5 <= len(session.turns) <= 7
        assert session.turns[0].think_s == 0
        for turn in session.turns:
            assert 20 <= len(turn.text) <= 60
            assert 24 <= turn.max_tokens <= 48
    starts = [session.start_s for session in workload.sessions]
    assert starts == sorted(starts) and starts[0] >= 0 and starts[-1] <= 10


def test_system_prompts_are_shared_by_popularity_and_nothing_else_is():
    workload = multiturn(replace(SMALL, sessions=600), seed=3)
    popularity = Counter(session.system for session in workload.sessions)
    first, second, third = (count for _, count in popularity.most_common())
    # Zipf(1) over three prompts: 6/11, 3/11, 2/11 of 600.
    assert abs(first - 327) < 50 and abs(second - 164) < 45 and abs(third - 109) < 40
    texts = [turn.text for session in workload.sessions for turn in session.turns]
    assert len(set(texts)) == len(texts)


def test_starts_are_a_poisson_process():
    """Gaps of a Poisson process are exponential: as wide as they are long."""
    workload = multiturn(replace(SMALL, sessions=2000, arrival_window_s=100.0), seed=5)
    gaps = [b.start_s - a.start_s for a, b in pairwise(workload.sessions)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.05, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.15)


@given(st.integers(1, 3000), st.integers(0, 100))
def test_prose_has_the_wanted_length(chars, seed):
    from random import Random

    text = prose(Random(seed), chars)
    assert len(text) == chars and text.isascii()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sessions": 0},
        {"turns": (0, 3)},
        {"turns": (5, 4)},
        {"user_chars": (10, 5)},
        {"reply_tokens": (0, 4)},
        {"think_mean_s": -1.0},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(WorkloadError):
        MultiturnSettings(**wrong)
