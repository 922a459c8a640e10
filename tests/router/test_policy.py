"""Policies: pure functions from a snapshot to a choice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import (
    MEANINGS,
    POLICIES,
    Candidate,
    Snapshot,
    cost,
    parts,
    predicted_ttft_s,
    why,
)


def candidate(name: str = "a", **given: float) -> Candidate:
    fields: dict[str, object] = {
        "replica": name,
        "rank": 0,
        "matched_tokens": 0,
        "queued_tokens": 0,
        "queue_s": 0.0,
        "prefill_fixed_s": 0.0,
        "prefill_s_per_token": 0.0001,
        "running": 0,
        **given,
    }
    return Candidate(**fields)  # type: ignore[arg-type]


def snapshot(*candidates: Candidate, tokens: int = 1000, turn: int = 0, draw: float = 0.0):
    return Snapshot(tokens, candidates, turn, draw, running_cost_s=0.001)


def test_cost_is_queue_plus_uncached_plus_batch() -> None:
    one = candidate(matched_tokens=600, queue_s=0.5, running=3)
    assert predicted_ttft_s(one, 1000, 0.001) == pytest.approx(0.5 + 0.04 + 0.003)
    whole = candidate(matched_tokens=1000)
    assert predicted_ttft_s(whole, 1000, 0.0) == pytest.approx(0.0001)


def test_cost_follows_the_cache_until_its_queue_costs_more() -> None:
    holder = candidate("holder", matched_tokens=900, queue_s=0.05)
    cold = candidate("cold")
    assert cost(snapshot(cold, holder)).chosen == 1
    swamped = candidate("holder", matched_tokens=900, queue_s=0.2)
    assert cost(snapshot(cold, swamped)).chosen == 0


def test_prefix_only_ignores_load_and_least_load_ignores_the_cache() -> None:
    both = snapshot(candidate(), candidate(matched_tokens=16, queue_s=100.0, running=9))
    assert POLICIES["prefix_only"](both).chosen == 1
    assert POLICIES["least_load"](both).chosen == 0


@pytest.mark.parametrize("name", ["cost", "round_robin", "least_load", "prefix_only"])
def test_equal_candidates_take_turns(name: str) -> None:
    equal = [candidate(str(i)) for i in range(4)]
    chosen = [POLICIES[name](snapshot(*equal, turn=turn)).chosen for turn in range(8)]
    assert chosen == [0, 1, 2, 3] * 2


def test_random_is_uniform_over_draws() -> None:
    equal = [candidate(str(i)) for i in range(4)]
    draws = Counter(POLICIES["random"](snapshot(*equal, draw=i / 400)).chosen for i in range(400))
    assert draws == {0: 100, 1: 100, 2: 100, 3: 100}


@given(st.data())
def test_every_policy_chooses_a_least_score_and_depends_on_nothing_else(data: st.DataObject):
    number = st.floats(0, 1e6)
    candidates = data.draw(
        st.lists(
            st.builds(
                candidate,
                matched_tokens=st.integers(0, 5000),
                queue_s=number,
                running=st.integers(0, 500),
            ),
            min_size=1,
            max_size=8,
        )
    )
    seen = snapshot(
        *candidates,
        turn=data.draw(st.integers(0, 99)),
        draw=data.draw(st.floats(0, 1, exclude_max=True)),
    )
    for policy in POLICIES.values():
        choice = policy(seen)
        assert choice == policy(seen)
        assert len(choice.scores) == len(candidates)
        assert choice.scores[choice.chosen] == min(choice.scores)


def decisions() -> st.SearchStrategy[Snapshot]:
    number = st.floats(0, 1e6)
    made = st.builds(
        Candidate,
        replica=st.sampled_from("abcd"),
        rank=st.integers(0, 3),
        matched_tokens=st.integers(0, 5000),
        queued_tokens=st.integers(0, 5000),
        queue_s=number,
        prefill_fixed_s=number,
        prefill_s_per_token=st.floats(1e-9, 10),
        running=st.integers(0, 500),
    )
    return st.builds(
        Snapshot,
        prompt_tokens=st.integers(0, 10_000),
        candidates=st.lists(made, min_size=1, max_size=8).map(tuple),
        turn=st.integers(0, 99),
        draw=st.floats(0, 1, exclude_max=True),
        running_cost_s=st.floats(0, 100),
    )


@given(decisions())
def test_the_parts_of_a_prediction_sum_to_the_score_to_the_last_bit(seen: Snapshot) -> None:
    for each, score in zip(seen.candidates, cost(seen).scores, strict=True):
        spent = parts(each, seen.prompt_tokens, seen.running_cost_s)
        assert spent.total_s == score
        assert sum(spent) == score
        assert min(spent) >= 0


@pytest.mark.parametrize("name", POLICIES)
@given(seen=decisions())
def test_every_decision_has_a_reason_that_names_the_chosen(name: str, seen: Snapshot) -> None:
    choice = POLICIES[name](seen)
    chosen = seen.candidates[choice.chosen]
    assert f"{chosen.replica}/{chosen.rank}" in why(name, seen, choice)
    assert MEANINGS[name]


def test_the_reason_is_the_largest_difference() -> None:
    def said(*candidates: Candidate) -> str:
        seen = snapshot(*candidates, tokens=2025)
        return why("cost", seen, cost(seen))

    holder = candidate("a", matched_tokens=2016)
    assert said(holder, candidate("b", queue_s=2.0)) == (
        "fewest predicted seconds: 0.001 s on a/0, next b/0 with 2.203 s: "
        "b/0 has 2.000 s of prefill queued"
    )
    assert said(holder, candidate("b")).endswith(": a/0 holds 2,016 of 2,025 tokens")
    assert said(candidate("a"), candidate("b", running=12)).endswith(
        ": b/0 has 12 requests running, a/0 0"
    )
    assert said(candidate("b"), candidate("a", matched_tokens=2016, queue_s=3.1)).endswith(
        "; a/0 holds 2,016 of 2,025 tokens, but 3.100 s of prefill are queued there"
    )
    assert said(candidate("a"), candidate("b")) == (
        "predicted seconds are equal (0.203 s): the turn of a/0 among 2 equals"
    )
    near = candidate("b", prefill_s_per_token=0.00010000001)
    assert "0.202500000 s on a/0, next b/0 with 0.202500020 s" in said(candidate("a"), near)
    assert said(candidate("a")) == "a/0 is the only candidate"
