"""The prefill meter: what remains of a prompt falls with what its rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache_index.flights import Flights
from cache_index.operations import Block, Store
from cache_index.types import SourceKey
from router.engines import ServedModel
from router.load import FleetLoad, RankLoad, Ticket
from router.meter import PrefillMeter
from router.placement import Placement
from router.planning import Plan
from tests.router.test_load import Clock

KEY = SourceKey("a", 0)
CHAIN = Random(1).randbytes(8 * 62)


def plan(model: str | None = "m", chains: Sequence[bytes] = (CHAIN,)) -> Plan:
    made = SimpleNamespace(
        model=model,
        roots=[("m", "", 1, {})] * len(chains),
        chains=chains,
        prompt=SimpleNamespace(token_ids=b"", salt=""),
    )
    return cast(Plan, made)


def placement(prompt_tokens: int, matched_tokens: int = 0) -> Placement:
    replica = SimpleNamespace(name="a", models={"m": ServedModel("m", "", None)})
    snapshot = SimpleNamespace(prompt_tokens=prompt_tokens)
    uncached = prompt_tokens - matched_tokens
    made: Any = Placement(
        cast(Any, replica), 0, matched_tokens, uncached, cast(Any, snapshot), cast(Any, None)
    )
    return cast(Placement, made)


class Rank:
    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = FleetLoad(1000.0, self.clock)
        self.load: RankLoad = self.fleet.rank("a", 0)
        self.flights = Flights()
        self.flights.follow(KEY)
        self.meter = PrefillMeter(self.flights, 16)

    def begin(self, ticket: Ticket, tokens: int = 1000, matched: int = 0) -> None:
        self.meter.begin(plan(), placement(tokens, matched), ticket)

    def stored(self, start: int, end: int) -> None:
        parent = Block(CHAIN[(start - 1) * 8 : start * 8], None) if start else None
        blocks = []
        for at in range(start, end):
            parent = Block(CHAIN[at * 8 : at * 8 + 8], parent)
            blocks.append(parent)
        rank = self.flights.of(KEY)
        if rank is not None:
            rank.take([Store("device", blocks)], 1)


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_queued_falls_step_by_step(streaming: bool) -> None:
    rank = Rank()
    with rank.load.take(1000, streaming) as ticket, rank.load.take(500, True):
        rank.begin(ticket)
        seen = [rank.load.queued_tokens]
        for start, end in ((0, 20), (20, 40), (40, 60), (60, 62)):
            rank.clock.now_s += 0.5
            rank.stored(start, end)
            rank.stored(start, end)
            seen.append(rank.load.queued_tokens)
        assert seen[:4] == [1500, 1180, 860, 540]
        assert rank.load.queue_s() == pytest.approx(seen[-1] * rank.load.prefill.s_per_token)
        # The rest that fills no block was computed with the last one: of a streamed answer one
        # token is left until its first token shows it.
        assert seen[4] == (501 if streaming else 500)
        rank.stored(40, 60)
        ticket.first_token()
        assert rank.load.queued_tokens == 500
        rank.meter.end(ticket)
        rank.meter.end(ticket)
    assert (rank.load.queued_tokens, rank.load.running) == (0, 0)
    assert not rank.flights.of(KEY)


def test_answers_that_are_not_streamed_teach_the_load_model() -> None:
    rank = Rank()
    for _ in range(60):
        with rank.load.take(1000, False) as ticket:
            rank.begin(ticket)
            rank.clock.now_s += 2.0
            rank.stored(0, 62)
            assert rank.load.queued_tokens == 0
            # Decoding goes on for long; that is not prefill.
            rank.clock.now_s += 30.0
            ticket.first_token()
            rank.meter.end(ticket)
    assert rank.load.prefill.seconds(1000) == pytest.approx(2.0, rel=0.02)


def test_what_the_engine_had_beyond_the_prediction_is_not_taken_for_speed() -> None:
    rank = Rank()
    for _ in range(60):
        with rank.load.take(1000, True) as ticket:
            rank.begin(ticket)
            rank.clock.now_s += 0.5
            rank.stored(50, 62)
            ticket.first_token()
            rank.meter.end(ticket)
    assert rank.load.prefill.seconds(200) == pytest.approx(0.5, rel=0.02)


def test_an_engine_that_has_lost_the_prefix_owes_more() -> None:
    rank = Rank()
    with rank.load.take(200, False) as ticket:
        rank.begin(ticket, 1000, matched=800)
        assert rank.load.queued_tokens == 200
        rank.stored(0, 20)
        assert rank.load.queued_tokens == 680
        rank.meter.end(ticket)
    assert rank.load.queued_tokens == 0


def test_a_long_rest_is_not_taken_for_computed() -> None:
    rank = Rank()
    with rank.load.take(1400, False) as ticket:
        rank.begin(ticket, 1400)
        rank.stored(0, 62)
        assert rank.load.queued_tokens == 1400 - 62 * 16
        rank.meter.end(ticket)


def test_a_prompt_without_tokens_is_not_followed() -> None:
    rank = Rank()
    with rank.load.take(100, False) as ticket:
        rank.meter.begin(plan(chains=()), placement(100), ticket)
        rank.meter.begin(plan(None), placement(100), ticket)
        rank.meter.begin(plan("another"), placement(100), ticket)
        assert not rank.flights.of(KEY)
        rank.meter.end(ticket)
