"""The tiers beside the device: pools that engines announce in their own stream.

They are sets, not counts, because some pools have every replica announce everything. A pool's
announcement counts only for a hash that this source has itself stored on its device. That gives it
the right root (Mooncake announces salted hashes without saying so) and refuses what no engine would
ask for (LMCache announces the unsalted hash of salted blocks). Where LMCache's announcements and
salted blocks come from one source they cannot be told apart, so none counts. Which cache group a
pool has, its announcement does not say either, so hybrid models get no credit from pools.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_index.event_types import BlockStored, EngineHash
from cache_index.operations import Block
from cache_index.types import DEVICE, HOST

__all__ = ["Tiers", "nameless", "take"]

_KNOWN = {"gpu": DEVICE, "cpu": HOST, "cpu_pinned": HOST}
# Tiers are labels and holders; an engine must not be able to make up any number of them.
_MAX_TIERS = 6
_NAME_CHARS = 24
_MAX_NAMES = 32


class Tiers:
    """From what engines call a medium to our tiers."""

    def __init__(self) -> None:
        self._seen = {DEVICE, HOST}
        self._known: dict[str | None, str] = {None: DEVICE}

    def of(self, medium: str | None) -> str:
        tier = self._known.get(medium)
        if tier is None:
            tier = self._tier(medium or "")
            if len(self._known) < _MAX_NAMES:
                self._known[medium] = tier
        return tier

    def _tier(self, medium: str) -> str:
        name = medium.lower()[:_NAME_CHARS].replace("\0", "")
        tier = _KNOWN.get(name, name)
        if tier not in self._seen and len(self._seen) >= _MAX_TIERS:
            return "other"
        self._seen.add(tier)
        return tier


def nameless(event: BlockStored) -> bool:
    """Tokens but no keys: it may be about salted blocks and not say so."""
    return event.token_count > 0 and event.extra_keys is None and event.group is None


def take(event: BlockStored, tier: str, blocks: Mapping[EngineHash, Block]) -> list[Block]:
    """Put the event's known blocks into a tier; returns those that were not in it."""
    fresh: list[Block] = []
    for engine_hash in event.hashes:
        block = blocks.get(engine_hash)
        if block is not None and block.units and tier not in block.tiers:
            block.tiers |= {tier}
            fresh.append(block)
    return fresh
