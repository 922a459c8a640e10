"""Prompts in flight, told by what their rank stores."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import Root, chain_packed, pack_tokens
from cache_index.events import decode_batch
from cache_index.flights import Flight, Flights
from cache_index.ledger import Ledger, Operation
from cache_index.types import SourceKey

from .publisher import MODEL, encode, stored

KEY = SourceKey("r0", 0)


class Rank:
    """An engine that computes prompts in chunks and announces them, and the gateway's ear."""

    def __init__(self, block: int = 16) -> None:
        self.block = block
        self.ledger = Ledger(MODEL, 16)
        self.flights = Flights()
        self.flights.follow(KEY)
        self.told: list[tuple[int, int]] = []

    def send(self, tokens: list[int], matched: int = 0) -> Flight:
        def told(start: int, done: int, unit: int) -> None:
            assert unit == self.block // 16
            self.told.append((start, done))

        hashes = chain_packed(Root(MODEL).digest(), pack_tokens(tokens[:-1]), 16)
        flight = Flight(KEY, hashes, matched, told)
        self.flights.begin(flight)
        return flight

    def store(self, tokens: list[int], start: int, end: int) -> list[Operation]:
        """The engine's blocks `start` to `end` of a prompt."""
        names = [hash(tuple(tokens[: (i + 1) * self.block])) & 2**63 - 1 for i in range(end)]
        event = stored(
            names[start:],
            tokens[start * self.block : end * self.block],
            parent=names[start - 1] if start else None,
            block_size=self.block,
        )
        out: list[Operation] = []
        self.ledger.apply(decode_batch(encode([event])).events, out)
        rank = self.flights.of(KEY)
        if rank is not None:
            rank.take(out, self.ledger.unit)
        return out


def prompt(seed: int, units: int, rest: int = 5) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(50_000) for _ in range(units * 16 + rest)]


def test_a_prompt_is_followed_chunk_by_chunk() -> None:
    rank, tokens = Rank(), prompt(1, 40)
    rank.send(tokens)
    for start in range(0, 40, 8):
        rank.store(tokens, start, start + 8)
    assert rank.told == [(0, 8), (0, 16), (0, 24), (0, 32), (0, 40)]


def test_what_is_told_twice_is_told_once() -> None:
    rank, tokens = Rank(), prompt(1, 40)
    rank.send(tokens)
    out = rank.store(tokens, 0, 8)
    held = rank.flights.of(KEY)
    assert held is not None
    held.take(out, 1)
    rank.store(tokens, 0, 8)
    assert rank.told == [(0, 8)]


def test_an_engine_that_had_more_or_less_than_predicted_is_believed() -> None:
    for predicted, had in ((4, 20), (20, 4), (20, 0)):
        rank, tokens = Rank(), prompt(1, 40)
        rank.store(tokens, 0, had)
        rank.send(tokens, matched=predicted)
        rank.store(tokens, had, had + 8)
        rank.store(tokens, had + 8, 40)
        assert rank.told == [(had, had + 8), (had, 40)]


def test_another_prompt_that_shares_a_beginning_says_as_much_as_is_shared() -> None:
    rank = Rank()
    tokens, other = prompt(1, 40), prompt(1, 20, 0) + prompt(2, 20)
    rank.send(tokens)
    rank.store(other, 0, 16)
    rank.store(other, 16, 40)
    assert rank.told == [(0, 16), (0, 20)]


def test_a_block_that_decoding_fills_says_nothing() -> None:
    rank, tokens = Rank(), prompt(1, 40)
    rank.send(tokens)
    rank.store(tokens, 0, 1)
    assert rank.told == []


def test_engine_blocks_of_many_units_count_one_by_one() -> None:
    rank, tokens = Rank(block=64), prompt(1, 40)
    rank.send(tokens)
    rank.store(tokens, 0, 1)
    rank.store(tokens, 1, 10)
    assert rank.told == [(0, 4), (0, 40)]


def test_who_has_ended_is_told_nothing_and_nothing_is_left() -> None:
    rank, tokens = Rank(), prompt(1, 40)
    first, second = rank.send(tokens), rank.send(tokens)
    rank.flights.end(first)
    rank.flights.end(first)
    rank.store(tokens, 0, 8)
    assert rank.told == [(0, 8)]
    rank.flights.end(second)
    assert not rank.flights.of(KEY)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_prompt_is_ever_further_than_what_is_stored(seed: int) -> None:
    rng = Random(seed)
    rank = Rank(rng.choice([16, 48]))
    per_block = rank.block // 16
    stems = [prompt(seed + i, 24, 0) for i in range(2)]
    prompts = [
        rng.choice(stems)[: rng.randrange(25) * 16] + prompt(rng.random(), rng.randrange(1, 30))
        for _ in range(6)
    ]
    flights = [rank.send(tokens, matched=rng.choice([0, 0, 5])) for tokens in prompts]
    chains = [flight.hashes for flight in flights]
    reached: set[bytes] = set()
    for _ in range(30):
        which = rng.randrange(len(prompts))
        blocks = len(prompts[which]) // rank.block
        start = rng.randrange(blocks + 1)
        end = rng.randrange(start, blocks + 1)
        before = list(flights[which].hashes)
        out = rank.store(prompts[which], start, end) if end > start else []
        assert before == list(flights[which].hashes)
        if out:
            chain = chain_packed(Root(MODEL).digest(), pack_tokens(prompts[which]), 16)
            reached |= {chain[at * 8 : at * 8 + 8] for at in range(end * per_block)}
        for flight, chain in zip(flights, chains, strict=True):
            stored_units = 0
            while chain[stored_units * 8 : stored_units * 8 + 8] in reached:
                stored_units += 1
            if flight.start >= 0:
                assert flight.done <= stored_units


def test_a_rank_that_nobody_follows_has_no_flights() -> None:
    flights = Flights()
    flight = Flight(KEY, b"", 0, lambda *_: None)
    flights.begin(flight)
    flights.end(flight)
    assert flights.of(KEY) is None
    # A new reader of the same rank comes before the old one has ended.
    flights.follow(KEY)
    flights.follow(KEY)
    flights.forget(KEY)
    assert flights.of(KEY) is not None
    flights.forget(KEY)
    assert flights.of(KEY) is None
