"""What a ledger says: blocks that are held now, and blocks that are not any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_index.blocks import HASH_BYTES
from cache_index.types import DEVICE

__all__ = ["Block", "NewEpoch", "Operation", "Remove", "Store", "runs"]


class Block:
    """One engine block: its base units (packed hashes), and how often it is held where.

    `units` is empty for a block that can never be credited: its content is not in its tokens alone.
    """

    __slots__ = ("device", "parent", "tiers", "units")

    def __init__(self, units: bytes, parent: Block | None) -> None:
        self.units = units
        self.parent = parent
        self.device = 0
        self.tiers: frozenset[str] = frozenset()

    def release(self, tier: str) -> bool:
        """Take one holding away; True if it was the last one in this tier."""
        if tier != DEVICE:
            held = tier in self.tiers
            self.tiers -= {tier}
            return held
        if self.device:
            self.device -= 1
            return self.device == 0
        return False

    @property
    def last(self) -> int:
        """The hash that a continuation of this block chains from."""
        return int.from_bytes(self.units[-HASH_BYTES:], "little")


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """All that was said about the source before is void."""

    reason: str


@dataclass(frozen=True, slots=True)
class Store:
    """A chain of blocks, each the parent of the next, is now held in `tier`.

    `old`: it was before, and is only told now.
    """

    tier: str
    blocks: Sequence[Block]
    old: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """A block is no longer held in `tier`, but for its first `keep` units: others have them too."""

    tier: str
    block: Block
    keep: int = 0


Operation = NewEpoch | Store | Remove


def runs(tier: str, blocks: Sequence[Block], *, old: bool = False) -> Iterator[Store]:
    """Cut `blocks` where one is not the parent of the next."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end].parent is not blocks[end - 1]:
            yield Store(tier, blocks[start:end], old)
            start = end
