"""A gateway's own copy of the index, fed by the change stream.

One connection waits at Redis for changes. Another asks, many times a second, for the number of the
last change: if the copy has it, the copy was current when that question was sent, and the age of
the last such moment is the lag. (A wait that ends by its own time limit could not tell: an idle
Redis looks at such limits only ten times a second.) Past the allowed lag, or without Redis, the
mirror is not `current` and matches nothing. A hole in the stream's numbers, or another generation
of the index, means starting over from a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from cache_index.blocks import pack_hashes
from cache_index.changes import apply_changes, holder_record, load_node
from cache_index.errors import IndexUnavailable, RadixInconsistent
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex, Snapshot
from cache_index.types import Holder

__all__ = ["Mirror"]

_log = logging.getLogger(__name__)
_BLOCK_MS = 500
_ASK_S = 0.025
_RETRY_S = (0.05, 1.0)
_SWEEP_NODES = 200


class Mirror:
    """Follows the index until cancelled; `match` reads the copy."""

    def __init__(self, redis: RedisIndex, *, max_units: int, max_lag_s: float = 0.1) -> None:
        self._redis = redis
        self._max_units = max_units
        self._max_lag_s = max_lag_s
        self._radix = RadixIndex(max_units)
        self._ready = False
        self._caught_up_at_s = 0.0
        self._position = 0
        self.snapshots = 0
        self.changes = 0
        self.failures = 0

    @property
    def radix(self) -> RadixIndex:
        return self._radix

    @property
    def lag_s(self) -> float:
        """Seconds since the copy was last known to be current; infinite before the first time."""
        return time.monotonic() - self._caught_up_at_s if self._ready else float("inf")

    @property
    def current(self) -> bool:
        return self._ready and self.lag_s <= self._max_lag_s

    def match(self, hashes: Sequence[int] | bytes) -> dict[Holder, int]:
        """Leading base units per holder; `hashes` as integers or packed."""
        if not self.current:
            return {}
        packed = hashes if isinstance(hashes, bytes) else pack_hashes(hashes)
        return self._radix.match(packed)

    async def run(self) -> None:
        """Follow for ever, whatever Redis does."""
        pause_s = _RETRY_S[0]
        while True:
            try:
                await self._follow()
            except* RadixInconsistent as reasons:
                _log.info("the mirror starts over: %s", reasons.exceptions[0])
                pause_s = _RETRY_S[0]
            except* IndexUnavailable as reasons:
                self.failures += 1
                # Once when it begins; what follows is the same.
                level = logging.WARNING if pause_s == _RETRY_S[0] else logging.DEBUG
                _log.log(level, "the mirror waits for Redis: %s", reasons.exceptions[0])
                pause_s = min(pause_s * 2, _RETRY_S[1])
            finally:
                self._ready = False
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        snapshot = await self._redis.snapshot()
        radix = await self._load(snapshot)
        self._position = snapshot.position
        self._radix = radix
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(radix, snapshot.generation))
            tasks.create_task(self._ask(snapshot.generation))

    async def _load(self, snapshot: Snapshot) -> RadixIndex:
        radix = RadixIndex(self._max_units)
        for holder_id, record in snapshot.holders.items():
            radix.add_holder(holder_id, holder_record(record))
        async with contextlib.aclosing(self._redis.nodes()) as pages:
            async for nodes in pages:
                for node_id, value in nodes:
                    load_node(radix, node_id, value)
                await asyncio.sleep(0)
        self.snapshots += 1
        return radix

    async def _read(self, radix: RadixIndex, generation: bytes | None) -> None:
        """Apply changes as they come."""
        while True:
            asked_at_s = time.monotonic()
            page = await self._redis.read_changes(self._position, _BLOCK_MS)
            if page.generation != generation:
                raise RadixInconsistent("another generation of the index")
            for entry_id, data in page.entries:
                if entry_id != self._position + 1:
                    raise RadixInconsistent("the change stream was trimmed")
                apply_changes(radix, data)
                self._position = entry_id
            self.changes += len(page.entries)
            radix.sweep(_SWEEP_NODES)
            if page.complete:
                self._was_current(asked_at_s)
            await asyncio.sleep(0)

    async def _ask(self, generation: bytes | None) -> None:
        """Find out whether the copy has the last change, also while there are none."""
        while True:
            asked_at_s = time.monotonic()
            tail = await self._redis.tail()
            if tail.generation != generation:
                raise RadixInconsistent("another generation of the index")
            if tail.position <= self._position:
                self._was_current(asked_at_s)
            await asyncio.sleep(_ASK_S)

    def _was_current(self, at_s: float) -> None:
        self._caught_up_at_s = max(self._caught_up_at_s, at_s)
        self._ready = True
