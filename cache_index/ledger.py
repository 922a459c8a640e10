"""What one publisher holds: the engine's block hashes, mapped to our own base units.

Device blocks are counted, because an engine announces a hash once for every physical block that
carries it and removes it as often. Other tiers are sets, because some pools have every replica
announce everything.

A pool's announcement counts only for a hash that this source has itself stored on its device. That
gives it the right root (Mooncake announces salted hashes without saying so) and refuses what no
engine would ask for (LMCache announces the unsalted hash of salted blocks). Where LMCache's
announcements and salted blocks come from one source they cannot be told apart, so none counts.

Two things the wire does not say: engines before vLLM 0.19 send no extra keys, so their salted
blocks look unsalted; and with `kv_cache_report_mode="full"` a block announced again looks like a
second copy and stays credited until the engine clears its cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_index.blocks import HASH_BYTES, TOKEN_BYTES, chain_packed
from cache_index.events import BlockRemoved, BlockStored, EngineHash, Event
from cache_index.identity import ModelIdentity, Root
from cache_index.types import DEVICE, HOST

__all__ = ["Block", "Ledger", "NewEpoch", "Operation", "Remove", "Store"]

_TIERS = {"gpu": DEVICE, "cpu": HOST, "cpu_pinned": HOST}
# Tiers are labels and holders; an engine must not be able to make up any number of them.
_MAX_TIERS = 6
_TIER_NAME_CHARS = 24
_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


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
    """A chain of blocks, each the parent of the next, is now held in `tier`."""

    tier: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Remove:
    """A block is no longer held in `tier`."""

    tier: str
    block: Block


Operation = NewEpoch | Store | Remove


class Ledger:
    """The engine's blocks of one life, by the engine's hash."""

    def __init__(self, model: ModelIdentity, base_unit_tokens: int) -> None:
        self._model = model
        self._base = base_unit_tokens
        self._blocks: dict[EngineHash, Block] = {}
        self._roots: dict[tuple[str, str], int] = {}
        self._tiers = {DEVICE, HOST}
        self.counts: Counter[str] = Counter()
        self.forget_shape()
        self.clear()

    def forget_shape(self) -> None:
        """A new life may have another block size and other groups."""
        self.block_tokens: int | None = None
        self.unusable = ""
        self._group: int | None = None

    def clear(self) -> None:
        self._blocks.clear()
        self.orphaned = False
        self._salted = False

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def unit(self) -> int:
        """Base units per engine block."""
        return (self.block_tokens or self._base) // self._base

    def held(self) -> Iterator[Store]:
        """Everything held now, as runs that an empty index can take."""
        blocks = list(self._blocks.values())
        yield from _runs(DEVICE, [block for block in blocks if block.device and block.units])
        for tier in sorted({tier for block in blocks for tier in block.tiers}):
            yield from _runs(tier, [b for b in blocks if tier in b.tiers and b.units])

    def apply(self, events: Iterable[Event], out: list[Operation]) -> bool:
        """Take one batch's events. True if the engine cleared its cache in it."""
        cleared = False
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, out)
            elif isinstance(event, BlockRemoved):
                self._remove(event, out)
            else:
                cleared = True
                self.counts["cleared"] += 1
                self.clear()
                out.append(NewEpoch("cleared"))
        return cleared

    def _tier(self, medium: str | None) -> str:
        if medium is None:
            return DEVICE
        name = medium.lower()[:_TIER_NAME_CHARS]
        tier = _TIERS.get(name, name)
        if tier not in self._tiers and len(self._tiers) >= _MAX_TIERS:
            return "other"
        self._tiers.add(tier)
        return tier

    # -- stores

    def _store(self, event: BlockStored, out: list[Operation]) -> None:
        tier = self._tier(event.medium)
        if tier != DEVICE:
            self._store_pool(event, tier, out)
            return
        self.counts["stored"] += 1
        if not self._counts_for_prefix(event) or not self._fits(event.block_tokens):
            return
        parent: Block | None = None
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self.counts["orphaned"] += len(event.hashes)
                self.orphaned = True
                return
        out.extend(_runs(DEVICE, self._take(event, parent)))

    def _take(self, event: BlockStored, parent: Block | None) -> list[Block]:
        """Count the event's blocks; returns those that were not held before."""
        units, credited = self._own_units(event, parent)
        width = self.unit * HASH_BYTES
        fresh: list[Block] = []
        for position, engine_hash in enumerate(event.hashes):
            block = self._blocks.get(engine_hash)
            if block is None:
                own = units[position * width : (position + 1) * width]
                block = Block(own if position < credited else b"", parent)
                self._blocks[engine_hash] = block
            if block.device == 0 and block.units:
                fresh.append(block)
            block.device += 1
            parent = block
        return fresh

    def _own_units(self, event: BlockStored, parent: Block | None) -> tuple[bytes, int]:
        """Our hashes of the event's blocks, and how many of the blocks have any."""
        if parent is not None and not parent.units:
            return b"", 0
        credited, seed = self._seed(event, parent)
        if event.token_count > len(event.hashes) * event.block_tokens:
            self.counts["token_mismatch"] += 1
            credited = 0
        credited = min(credited, event.token_count // event.block_tokens)
        if credited < len(event.hashes):
            self.counts["uncredited"] += len(event.hashes) - credited
        tokens = event.tokens[: credited * event.block_tokens * TOKEN_BYTES]
        return chain_packed(seed, tokens, self._base), credited

    def _seed(self, event: BlockStored, parent: Block | None) -> tuple[int, int]:
        """How many leading blocks depend on tokens, adapter and salt alone, and their seed."""
        adapter = event.lora_name or ""
        if event.lora_id is not None and not adapter:
            return 0, 0
        keys = [_other_keys(item, adapter) for item in event.extra_keys or ()]
        salt = event.cache_salt or ""
        if parent is None and keys and len(keys[0]) == 1 and isinstance(keys[0][0], str):
            salt, keys[0] = keys[0][0], []
        self._salted = self._salted or bool(salt)
        plain = next((i for i, rest in enumerate(keys) if rest), len(event.hashes))
        return plain, self._root(adapter, salt) if parent is None else parent.last

    def _root(self, adapter: str, salt: str) -> int:
        key = (adapter, salt)
        if key not in self._roots:
            if len(self._roots) >= 4096:
                self._roots.clear()
            self._roots[key] = Root(self._model, adapter, salt).digest()
        return self._roots[key]

    def _store_pool(self, event: BlockStored, tier: str, out: list[Operation]) -> None:
        self.counts["stored_pool"] += 1
        anonymous = event.token_count > 0 and event.extra_keys is None and event.group is None
        fresh: list[Block] = []
        for engine_hash in event.hashes:
            block = self._blocks.get(engine_hash)
            if block is None or not block.units or (anonymous and self._salted):
                self.counts["pool_uncredited"] += 1
            elif tier not in block.tiers:
                block.tiers |= {tier}
                fresh.append(block)
        out.extend(_runs(tier, fresh))

    def _counts_for_prefix(self, event: BlockStored) -> bool:
        """Only the first full-attention group decides an ordinary prefix hit."""
        full = event.kind is None or event.kind in _FULL_ATTENTION
        if not full or (event.kind is None and event.group not in (None, 0)):
            self.counts["other_group"] += 1
            return False
        if event.group is not None and self._group is None:
            self._group = event.group
        if event.group != self._group and event.group is not None:
            self.counts["other_group"] += 1
            return False
        return True

    def _fits(self, block_tokens: int) -> bool:
        if block_tokens <= 0:
            self.counts["placeholder"] += 1
            return False
        if self.block_tokens is None:
            if block_tokens % self._base:
                self.unusable = (
                    f"its block of {block_tokens} tokens is not a multiple of {self._base}"
                )
                return False
            self.block_tokens = block_tokens
        if block_tokens != self.block_tokens:
            self.counts["other_block_size"] += 1
            self.orphaned = True
            return False
        return True

    # -- removals

    def _remove(self, event: BlockRemoved, out: list[Operation]) -> None:
        tier = self._tier(event.medium)
        self.counts["removed"] += 1
        if event.group is not None and self._group is not None and event.group != self._group:
            return
        for engine_hash in event.hashes:
            block = self._blocks.get(engine_hash)
            if block is None:
                self.counts["removed_unknown"] += 1
                continue
            if self._release(block, tier) and block.units:
                out.append(Remove(tier, block))
            if not block.device and not block.tiers:
                del self._blocks[engine_hash]

    def _release(self, block: Block, tier: str) -> bool:
        """Take one holding away; True if it was the last one in this tier."""
        if tier != DEVICE:
            held = tier in block.tiers
            block.tiers -= {tier}
            return held
        if block.device:
            block.device -= 1
            return block.device == 0
        return False


def _other_keys(keys: Sequence[Any] | None, adapter: str) -> list[Any]:
    """A block's extra keys without the adapter's name, which the event carries anyway."""
    rest = list(keys or ())
    if adapter and rest and rest[0] == adapter:
        del rest[0]
    return rest


def _runs(tier: str, blocks: Sequence[Block]) -> Iterator[Store]:
    """Cut `blocks` where one is not the parent of the next."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end].parent is not blocks[end - 1]:
            yield Store(tier, blocks[start:end])
            start = end
