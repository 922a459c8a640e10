"""Prompts in flight: what this gateway has sent to a rank, told by the rank's own stored blocks.

An engine announces what it has computed after every step, streaming or not. A stored chain that
goes on where a prompt's computed part ended says how far the prompt is now. The work is bounded:
runs of stored blocks of one batch are joined, short ones (decoding fills a block now and then) only
count where they are just what comes next, and each is compared with the oldest prompts only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from cache_index.blocks import HASH_BYTES
from cache_index.operations import Operation, Store
from cache_index.proof import Scheme
from cache_index.types import DEVICE, SourceKey

__all__ = ["Flight", "Flights", "RankFlights"]

# Of one rank; what is sent beyond is not followed.
_MAX_FLIGHTS = 512
# Prompts that a stored run is compared with.
_MAX_COMPARED = 32
_MIN_RUN_UNITS = 4
# A rank's last stores of a prompt may arrive after its answer.
_KEEP_ENDED_S = 5.0
_MAX_ENDED = 16
# Times that a whole prompt is searched for the place of a run that begins elsewhere.
_MAX_SEARCHES = 4


class Flight:
    """A prompt sent to a rank: its packed chain, and the tokens and the salt that it is made from
    unless an adapter is in it too. All are references, not copies.

    `stored` is called with the unit from which blocks were computed, the unit up to which they are,
    and the rank's units per block, while `waiting` is true.
    """

    __slots__ = (
        "_names",
        "_searches",
        "done",
        "hashes",
        "key",
        "salt",
        "start",
        "stored",
        "tokens",
        "waiting",
    )

    def __init__(
        self,
        key: SourceKey,
        hashes: bytes,
        matched: int,
        stored: Callable[[int, int, int], None],
        tokens: bytes = b"",
        salt: str = "",
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.salt = salt
        self._names: dict[tuple[Scheme, int], list[bytes]] | None = None
        self.hashes = hashes
        self.done = matched
        self.start = -1
        self.stored = stored
        self.waiting = True
        self._searches = 0

    @property
    def names(self) -> dict[tuple[Scheme, int], list[bytes]]:
        """The names that engines give to the prompt's blocks, as far as anybody has asked."""
        if self._names is None:
            self._names = {}
        return self._names

    def continues(self, run: bytes) -> bool:
        """Whether a run is just what comes next, of a prompt that has been met before."""
        at = self.done * HASH_BYTES
        return self.start >= 0 and run[:HASH_BYTES] == self.hashes[at : at + HASH_BYTES]

    def take(self, run: bytes, unit: int) -> None:
        """A chain that was stored; nothing happens if it is not this prompt's."""
        at, place = self._meets(run)
        if at < 0:
            return
        shared = _common(run[at:], self.hashes[place * HASH_BYTES :])
        first = self.start < 0
        if first:
            self.start = max(0, place - at // HASH_BYTES)
        # What was predicted to be held may turn out to be computed: then less is done than that.
        if first or place + shared > self.done:
            self.done = place + shared
            self.stored(self.start, self.done, unit)

    def _meets(self, run: bytes) -> tuple[int, int]:
        """Where in the run, and at which unit of the prompt, the two go on together."""
        following = self.hashes[self.done * HASH_BYTES : (self.done + 1) * HASH_BYTES]
        if following:
            at = _find(run, following)
            if at >= 0:
                return at, self.done
        if self._searches < _MAX_SEARCHES and self.start < 0:
            # The engine had more, or less, than was predicted.
            self._searches += 1
            place = _find(self.hashes, run[:HASH_BYTES])
            if place >= 0:
                return 0, place // HASH_BYTES
        return -1, 0


class RankFlights:
    """The prompts in flight at one rank, the oldest first, and those that have just ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.followers = 0
        self._flights: dict[Flight, None] = {}
        self._ended: deque[tuple[float, Flight]] = deque(maxlen=_MAX_ENDED)

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        self._forget()
        if len(self._flights) < _MAX_FLIGHTS:
            self._flights[flight] = None

    def remove(self, flight: Flight) -> None:
        if flight in self._flights:
            del self._flights[flight]
            self._ended.append((self._clock(), flight))

    def prompts(self, limit: int) -> list[Flight]:
        """Those in flight and those that ended a moment ago, as far as their tokens are known."""
        self._forget()
        every = chain(self._flights, (flight for _, flight in self._ended))
        return list(islice((flight for flight in every if flight.tokens), limit))

    def _forget(self) -> None:
        while self._ended and self._clock() - self._ended[0][0] > _KEEP_ENDED_S:
            self._ended.popleft()

    def take(self, operations: Iterable[Operation], unit: int) -> None:
        """What the rank has stored now, as far as it is about prompts whose prefill goes on."""
        waiting = list(islice((each for each in self._flights if each.waiting), _MAX_COMPARED))
        if not waiting:
            return
        for run in _runs(operations):
            short = len(run) < _MIN_RUN_UNITS * HASH_BYTES
            for flight in waiting:
                if flight.waiting and (not short or flight.continues(run)):
                    flight.take(run, unit)


class Flights:
    """By rank; kept by the router, read where the ranks' events arrive.

    Only ranks that somebody follows have any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranks: dict[SourceKey, RankFlights] = {}

    def of(self, key: SourceKey) -> RankFlights | None:
        return self._ranks.get(key)

    def follow(self, key: SourceKey) -> None:
        """A rank's events are read from now on."""
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = RankFlights(self._clock)
        rank.followers += 1

    def forget(self, key: SourceKey) -> None:
        """They are not any more. As often as `follow`, because one reader may relieve another."""
        rank = self._ranks.get(key)
        if rank is not None:
            rank.followers -= 1
            if not rank.followers:
                del self._ranks[key]

    def begin(self, flight: Flight) -> None:
        rank = self._ranks.get(flight.key)
        if rank is not None:
            rank.add(flight)

    def end(self, flight: Flight) -> None:
        flight.waiting = False
        rank = self._ranks.get(flight.key)
        if rank is not None:
            rank.remove(flight)


def _runs(operations: Iterable[Operation]) -> Iterator[bytes]:
    """Chains of units stored on the device, joined where one goes on from another."""
    units: list[bytes] = []
    last = None
    for operation in operations:
        if not isinstance(operation, Store) or operation.old:
            continue
        if not operation.tier.startswith(DEVICE):
            continue
        if units and operation.blocks[0].parent is not last:
            yield b"".join(units)
            units = []
        units.extend(block.units for block in operation.blocks)
        last = operation.blocks[-1]
    if units:
        yield b"".join(units)


def _find(packed: bytes, unit: bytes) -> int:
    """Where a unit begins, in bytes; -1 if it is not there."""
    at = packed.find(unit)
    while at >= 0 and at % HASH_BYTES:
        at = packed.find(unit, at + 1)
    return at


def _common(run: bytes, other: bytes) -> int:
    """Units that two chains share from their beginning."""
    length = min(len(run), len(other))
    if run[:length] == other[:length]:
        return length // HASH_BYTES
    at = 0
    while run[at : at + HASH_BYTES] == other[at : at + HASH_BYTES]:
        at += HASH_BYTES
    return at // HASH_BYTES
