"""KV events as the index understands them, whatever engine sent them in whatever encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cache_index.blocks import TOKEN_BYTES

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EngineHash", "Event", "EventBatch"]

EngineHash = int | bytes
"""As the engine names a block: 64 bits without a sign, or a whole digest."""


# Structs, because tens of thousands are made each second: in C, and out of the collector's sight.
class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that became reusable. `tokens` is u32 little endian, all blocks one after another.

    `extra_keys` has one entry per block, None where the wire has no such field. `window` is in
    tokens. `lookahead`: the hashes cover tokens of the following block too. `reused`: announced
    again because a request used them.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: bytes
    block_tokens: int
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group: int | None = None
    kind: str | None = None
    cache_salt: str | None = None
    window: int | None = None
    lookahead: bool = False
    reused: bool = False

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks that can no longer be reused."""

    hashes: Sequence[EngineHash]
    medium: str | None = None
    group: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The engine's prefix cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """One published message. The counters say what of it could not be used."""

    timestamp_s: float
    events: list[Event]
    rank: int | None
    malformed: int = 0
    unknown_tags: int = 0
    unknown_fields: int = 0
