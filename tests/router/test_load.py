"""Load: what a rank owes, and that every way out gives it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.load import FleetLoad, RankLoad
from router.prefill import PrefillCost, PrefillModel


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rank(s_per_token: float = 0.001, fixed_s: float = 0.0) -> tuple[RankLoad, Clock]:
    clock = Clock()
    return RankLoad(PrefillModel(PrefillCost(fixed_s, s_per_token)), clock), clock


def test_queue_is_the_sum_of_pending_prefill_and_drains_with_time() -> None:
    load, clock = rank()
    with load.take(1000, True), load.take(500, True):
        assert (load.running, load.queued_tokens) == (2, 1500)
        assert load.queue_s() == pytest.approx(1.5)
        clock.now_s += 1.2
        assert load.queue_s() == pytest.approx(0.3)
        clock.now_s += 5
        assert load.queue_s() == 0.0
    assert (load.running, load.queued_tokens, load.queue_s()) == (0, 0, 0.0)


def test_first_token_leaves_exactly_what_is_still_pending() -> None:
    load, clock = rank()
    with load.take(100, True) as first, load.take(400, True):
        clock.now_s += 0.1
        first.first_token()
        first.first_token()
        assert (load.running, load.queued_tokens) == (2, 400)
        assert load.queue_s() == pytest.approx(0.4)


def test_an_answer_that_is_not_streamed_is_prefilled_when_a_later_one_is() -> None:
    load, clock = rank()
    with load.take(100, False), load.take(50, True) as later, load.take(70, False):
        clock.now_s += 0.2
        later.first_token()
        assert load.queued_tokens == 70


def test_rate_is_learned_from_service_time_not_from_waiting() -> None:
    load, clock = rank(0.001)
    for _ in range(60):
        with load.take(1000, True) as first, load.take(1000, True) as second:
            clock.now_s += 2.0
            first.first_token()
            clock.now_s += 2.0
            second.first_token()
    assert load.prefill.seconds(1000) == pytest.approx(2.0, rel=0.01)


def test_the_fixed_part_is_not_queued_for() -> None:
    load, _ = rank(0.001, fixed_s=0.1)
    with load.take(100, True), load.take(200, True):
        assert load.queue_s() == pytest.approx(0.3)
        assert load.prefill.seconds(100) == pytest.approx(0.2)


def test_what_one_rank_learns_is_the_prior_of_the_others() -> None:
    clock = Clock()
    fleet = FleetLoad(1000.0, clock)
    for _ in range(40):
        for tokens in (200, 3000):
            with fleet.rank("a", 0).take(tokens, True) as ticket:
                clock.now_s += 0.05 + tokens * 0.0002
                ticket.first_token()
    new = fleet.rank("b", 0).prefill
    assert new.seconds(200) == pytest.approx(0.09, rel=0.1)
    assert new.seconds(3000) == pytest.approx(0.65, rel=0.1)


def test_an_error_inside_gives_the_load_back() -> None:
    load, _ = rank()
    with pytest.raises(KeyError), load.take(10, True):
        raise KeyError
    assert (load.running, load.queued_tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("eflt"), st.integers(1, 5000))))
def test_load_is_never_negative_and_returns_to_zero(steps: list[tuple[int, str, int]]) -> None:
    load, clock = rank()
    inside: dict[int, object] = {}
    for slot, action, amount in steps:
        if action == "t":
            clock.now_s += amount / 1000
        elif action == "e" and slot not in inside:
            inside[slot] = load.take(amount, amount % 2 == 0).__enter__()
        elif action == "f" and slot in inside:
            inside[slot].first_token()  # type: ignore[attr-defined]
        elif action == "l" and slot in inside:
            inside.pop(slot).__exit__(None, None, None)  # type: ignore[attr-defined]
        assert load.running == len(inside)
        assert load.queued_tokens >= 0 and load.queue_s() >= 0
    for ticket in inside.values():
        ticket.__exit__(None, None, None)  # type: ignore[attr-defined]
    assert (load.running, load.queued_tokens, load.queue_s()) == (0, 0, 0.0)


def test_fleet_keeps_one_load_per_rank() -> None:
    fleet = FleetLoad(1000.0, Clock())
    assert fleet.rank("a", 0) is fleet.rank("a", 0)
    assert fleet.rank("a", 0) is not fleet.rank("a", 1)
    assert fleet.rank("a", 0).prefill.s_per_token == 0.001
    assert [fleet.next_turn() for _ in range(3)] == [0, 1, 2]


def test_the_mean_prefill_follows_what_is_placed() -> None:
    fleet = FleetLoad(1000.0, Clock())
    fleet.placed(0.1)
    assert fleet.mean_prefill_s == pytest.approx(0.1)
    fleet.placed(0.3)
    assert fleet.mean_prefill_s == pytest.approx(0.11)
    for _ in range(200):
        fleet.placed(0.2)
    assert fleet.mean_prefill_s == pytest.approx(0.2, rel=0.01)
