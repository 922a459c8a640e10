"""What a prefill costs, learned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefill import PrefillCost, PrefillModel

PRIOR = PrefillCost(0.005, 1 / 8000)


@pytest.mark.parametrize("truth", [PrefillCost(0.02, 1 / 4500), PrefillCost(0.0, 1 / 30000)])
def test_fixed_and_per_token_parts_are_found(truth: PrefillCost) -> None:
    model = PrefillModel(PRIOR)
    rng = random.Random(1)
    for _ in range(60):
        tokens = rng.choice((100, 400, 1500, 6000))
        model.learn(tokens, truth.seconds(tokens) * rng.uniform(0.9, 1.1))
    for tokens in (100, 1000, 8000):
        assert model.cost.seconds(tokens) == pytest.approx(truth.seconds(tokens), rel=0.15)


def test_before_the_first_sample_the_prior_holds_even_while_it_learns() -> None:
    fleet = PrefillModel(PRIOR)
    rank = PrefillModel(fleet)
    assert rank.cost == PRIOR
    fleet.learn(1000, 1.0)
    assert rank.cost == fleet.cost != PRIOR


def test_one_outlier_counts_four_times_the_prediction_at_most() -> None:
    wild, bounded = PrefillModel(PRIOR), PrefillModel(PRIOR)
    for model in (wild, bounded):
        for _ in range(5):
            model.learn(1000, PRIOR.seconds(1000))
    wild.learn(1000, 1e6)
    bounded.learn(1000, 4 * PRIOR.seconds(1000))
    assert wild.cost == pytest.approx(bounded.cost)


@pytest.mark.parametrize("off", [0.02, 40.0])
def test_a_prior_that_never_was_true_is_left_with_the_first_sample(off: float) -> None:
    model = PrefillModel(PRIOR)
    model.learn(500, PRIOR.seconds(500) * off)
    assert model.cost.seconds(500) == pytest.approx(PRIOR.seconds(500) * off, rel=0.01)
    assert model.cost.seconds(2000) > 3 * model.cost.seconds(500)


def test_a_slow_first_answer_is_forgotten_with_the_next() -> None:
    model = PrefillModel(PRIOR)
    model.learn(500, 30.0)
    for _ in range(3):
        model.learn(500, PRIOR.seconds(500))
    assert model.cost.seconds(500) == pytest.approx(PRIOR.seconds(500), rel=0.05)


def test_samples_of_one_length_still_give_a_line() -> None:
    model = PrefillModel(PRIOR)
    for _ in range(100):
        model.learn(500, 0.2)
    assert model.cost.seconds(500) == pytest.approx(0.2, rel=0.05)
    assert model.cost.seconds(5000) > model.cost.seconds(500)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(1e-6, 1e4)), max_size=60))
def test_whatever_is_learned_no_cost_is_negative(samples: list[tuple[int, float]]) -> None:
    model = PrefillModel(PRIOR)
    for tokens, seconds in samples:
        model.learn(tokens, seconds)
        assert model.cost.fixed_s >= 0 and model.cost.s_per_token > 0
        assert 0 < model.cost.seconds(1000) < 1e9
