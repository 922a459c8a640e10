"""What first tokens say of the pace of a rank: samples of steps, not of requests."""

from __future__ import annotations

import random

import pytest

from router.load import FleetLoad, RankLoad, Ticket
from router.pace import Pace


def test_what_ends_in_one_step_is_one_sample() -> None:
    learned: list[tuple[int, float]] = []
    pace = Pace(lambda tokens, seconds: learned.append((tokens, seconds)))
    pace.ended(50, placed_at_s=0.4, now_s=1.0)
    pace.ended(900, placed_at_s=0.0, now_s=1.004)
    assert learned == [] and pace.open
    pace.ended(300, placed_at_s=0.9, now_s=1.5)
    assert learned == [(950, pytest.approx(1.004))]
    pace.settle(1.52)
    assert len(learned) == 1
    pace.settle(1.7)
    assert learned[1:] == [(300, pytest.approx(0.496))]
    assert not pace.open


def test_parts_count_with_the_next_end_whoevers_they_are() -> None:
    learned: list[tuple[int, float]] = []
    pace = Pace(lambda tokens, seconds: learned.append((tokens, seconds)))
    pace.computed(2000)
    pace.ended(100, placed_at_s=1.0, now_s=2.0)
    pace.settle(9.0)
    assert learned == [(2100, 1.0)]


def test_an_end_without_a_cost_starts_the_next_sample() -> None:
    learned: list[tuple[int, float]] = []
    pace = Pace(lambda tokens, seconds: learned.append((tokens, seconds)))
    pace.skip(5.0)
    pace.ended(10, placed_at_s=1.0, now_s=6.0)
    pace.settle(9.0)
    assert learned == [(10, 1.0)]


class Engine:
    """Prefills all that waits in one step, as vLLM does below its token budget."""

    def __init__(self, load: RankLoad, clock: list[float], fixed_s: float, token_s: float) -> None:
        self.load, self.clock = load, clock
        self.fixed_s, self.token_s = fixed_s, token_s
        self.waiting: list[tuple[Ticket, int]] = []

    def send(self, tokens: int) -> None:
        self.waiting.append((self.load.take(tokens, True).__enter__(), tokens))

    def step(self) -> None:
        batch, self.waiting = self.waiting, []
        self.clock[0] += self.fixed_s + sum(tokens for _, tokens in batch) * self.token_s
        for ticket, _ in batch:
            self.clock[0] += 0.0004  # one answer after the other
            ticket.first_token()
            ticket.__exit__(None, None, None)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_a_token_is_found_under_load(seed: int) -> None:
    """Prompts of any length share steps; what is learned must still tell long from short."""
    rng, clock = random.Random(seed), [0.0]
    load = FleetLoad(8000.0, lambda: clock[0]).rank("a", 0)
    engine = Engine(load, clock, fixed_s=0.03, token_s=0.0014)
    for _ in range(40):
        for _ in range(rng.randint(1, 4)):
            engine.send(rng.choice((80, 150, 300, 600)))
        engine.step()
        clock[0] += rng.choice((0.0, 0.5))
    cost = load.prefill
    assert cost.seconds(100) == pytest.approx(0.17, rel=0.25)
    assert cost.seconds(600) == pytest.approx(0.87, rel=0.15)
    engine.send(1000)
    assert load.queue_s() == pytest.approx(1.4, rel=0.2)
