"""A gateway's own copy of the index, fed by the change stream.

Reading waits at Redis for at most `_BLOCK_MS`; an answer without a rest says that the copy was
current at that moment, so the age of the last such answer is the lag. Past the allowed lag, or
without Redis, the mirror is not `current` and matches nothing. A hole in the stream's numbers, or
another generation of the index, means starting over from a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from cache_index.blocks import pack_hashes
from cache_index.changes import apply_changes, holder_record, load_node
from cache_index.errors import IndexUnavailable
from cache_index.radix import RadixInconsistent, RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.types import Holder

__all__ = ["Mirror"]

_log = logging.getLogger(__name__)
_BLOCK_MS = 40
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
            except RadixInconsistent as reason:
                _log.info("the mirror starts over: %s", reason)
                pause_s = _RETRY_S[0]
            except IndexUnavailable as reason:
                self.failures += 1
                _log.debug("the mirror waits for Redis: %s", reason)
                pause_s = min(pause_s * 2, _RETRY_S[1])
            finally:
                self._ready = False
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        radix = RadixIndex(self._max_units)
        snapshot = await self._redis.snapshot()
        for holder_id, record in snapshot.holders.items():
            radix.add_holder(holder_id, holder_record(record))
        async with contextlib.aclosing(self._redis.nodes()) as pages:
            async for nodes in pages:
                for node_id, value in nodes:
                    load_node(radix, node_id, value)
                await asyncio.sleep(0)
        self.snapshots += 1
        position = snapshot.position
        while True:
            page = await self._redis.read_changes(position, _BLOCK_MS)
            if page.generation != snapshot.generation:
                raise RadixInconsistent("another generation of the index")
            for entry_id, data in page.entries:
                if entry_id != position + 1:
                    raise RadixInconsistent("the change stream was trimmed")
                apply_changes(radix, data)
                position = entry_id
            self.changes += len(page.entries)
            radix.sweep(_SWEEP_NODES)
            if page.complete:
                self._radix = radix
                self._caught_up_at_s = time.monotonic()
                self._ready = True
            await asyncio.sleep(0)
