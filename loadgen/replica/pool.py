"""What an LMCache server behind a rank adds to its KV events: blocks in the CPU's memory.

Of the pool only its announcements are simulated, no request is served from it. As seen of LMCache
0.5: a chunk is a block and comes in an event of its own, without extra keys; what is stored for a
salted request is announced under the hash that it would have without its salt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from loadgen.replica.events import BlockRemoved, BlocksStored, KVEvent
from loadgen.replica.hashing import chain, root_hash
from loadgen.replica.setup import Pool

CPU = "CPU"


class PoolAnnouncer:
    """Announcements of one rank about a pool that keeps the `blocks` used last."""

    def __init__(self, mode: Pool, blocks: int, seed: int) -> None:
        self._mode = mode
        self._blocks = blocks
        self._seed = seed
        self._held: OrderedDict[int, None] = OrderedDict()
        self._unsalted: OrderedDict[int, int] = OrderedDict()

    def with_pool(self, events: Sequence[KVEvent]) -> list[KVEvent]:
        """A step's events and what the pool has to say to them."""
        said = list(events)
        if self._mode in (Pool.NONE, Pool.SILENT):
            return said
        for event in events:
            if isinstance(event, BlocksStored):
                said += self._store(event)
        return said

    def _store(self, event: BlocksStored) -> Iterator[KVEvent]:
        size = event.block_size_tokens
        parent = None if event.parent is None else self._unsalted.get(event.parent, event.parent)
        root = root_hash(self._seed, "", event.adapter)
        hashes = chain(root if parent is None else parent, event.token_ids, size)
        for place, (salted, plain) in enumerate(zip(event.hashes, hashes, strict=True)):
            self._remember(salted, plain)
            if plain not in self._held:
                tokens = event.token_ids[place * size : (place + 1) * size]
                yield BlocksStored([plain], parent, tokens, size, "", event.adapter, medium=CPU)
                yield from self._make_room()
            self._held[plain] = None
            self._held.move_to_end(plain)
            parent = plain

    def _make_room(self) -> Iterator[KVEvent]:
        while len(self._held) >= self._blocks:
            gone, _ = self._held.popitem(last=False)
            if self._mode is Pool.LMCACHE_DRIVEN:
                yield BlockRemoved(gone, medium=CPU)

    def _remember(self, salted: int, plain: int) -> None:
        if salted != plain:
            self._unsalted[salted] = plain
            while len(self._unsalted) > self._blocks:
                self._unsalted.popitem(last=False)
