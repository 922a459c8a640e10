"""One account of blocks per cache group, and what the groups of one class have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cache_index.blocks import HASH_BYTES
from cache_index.event_types import BlockStored, EngineHash
from cache_index.groups import FULL, GroupClass, Shape, rule_of
from cache_index.operations import Block, Remove, Store, runs
from cache_index.types import DEVICE

__all__ = ["Account", "Accounts"]

_MAX_GROUPS = 64
# A class's label names all of them and must fit into a record of Redis.
_MAX_CLASSES = 12
_KIND_CHARS = 40
_MAX_COMPARED = 32


class Account:
    """The blocks of one group. `siblings` are the other groups of its class.

    Blocks of several units may have their first units in common (`_firsts`): prompts that part in
    the middle of a block.
    """

    __slots__ = ("_firsts", "block_tokens", "blocks", "label", "rule", "siblings", "window")

    def __init__(self, rule: str, block_tokens: int, window: int | None) -> None:
        self.rule = rule
        self.block_tokens = block_tokens
        self.window = window
        self.blocks: dict[EngineHash, Block] = {}
        self.label = DEVICE
        self.siblings: Sequence[Account] = ()
        self._firsts: dict[bytes, list[Block]] = {}

    def add(self, engine_hash: EngineHash, block: Block) -> None:
        self.blocks[engine_hash] = block
        if len(block.units) > HASH_BYTES:
            self._firsts.setdefault(block.units[:HASH_BYTES], []).append(block)

    def drop(self, engine_hash: EngineHash, block: Block) -> None:
        del self.blocks[engine_hash]
        if len(block.units) > HASH_BYTES:
            first = block.units[:HASH_BYTES]
            others = self._firsts[first]
            others.remove(block)
            if not others:
                del self._firsts[first]

    def clear(self) -> None:
        self.blocks.clear()
        self._firsts.clear()

    def told(self, engine_hash: EngineHash) -> bool:
        """Whether what this group holds of a block is told: its siblings have it too."""
        return not self.siblings or self.joint(engine_hash)

    def removal(self, block: Block, tier: str) -> Remove:
        """What is to be said of a block that is in this tier no more."""
        label = self.label if tier == DEVICE else tier
        return Remove(
            label, block, self.shared(block, tier) if len(block.units) > HASH_BYTES else 0
        )

    def shared(self, block: Block, tier: str) -> int:
        """How many of the first units of a block of several other blocks in this tier need."""
        others = self._firsts[block.units[:HASH_BYTES]]
        if len(others) > _MAX_COMPARED:
            # Keeping too many does no harm: without its last unit a block does not count.
            return len(block.units) // HASH_BYTES - 1
        keep = 0
        for other in others:
            held = other.device if tier == DEVICE else tier in other.tiers
            if other is not block and held:
                keep = max(keep, _common(block.units, other.units))
        return keep

    def joint(self, engine_hash: EngineHash) -> bool:
        """Whether all siblings hold this block too."""
        for other in self.siblings:
            block = other.blocks.get(engine_hash)
            if block is None or not block.device:
                return False
        return True


class Accounts:
    """All groups of one life. `fault`: why they cannot be credited; `reshaped`: tell all anew.

    `named` has those that a removal names: one, or all of them if it names none.
    """

    def __init__(self, base_unit_tokens: int) -> None:
        self.base = base_unit_tokens
        self.by_index: dict[int, Account] = {}
        self._units: dict[str, tuple[int, bool]] = {}
        self.named: dict[int | None, Sequence[Account]] = {}
        self._broken = ""
        self._leaderless = False
        self._highest = 0
        self.unit = 1
        self.reshaped = False
        self.misfit = False

    @property
    def fault(self) -> str:
        if self._broken or self._leaderless:
            return self._broken or "it has no full-attention group"
        # Engines number their groups from 0, and a match needs all of them.
        missing = self.by_index and self._highest >= len(self.by_index)
        return "not all of its cache groups have been heard" if missing else ""

    def heard(self, group: int | None) -> None:
        """A group has been named on the wire, so it is there, and all before it."""
        self._highest = max(self._highest, group or 0)

    @property
    def only(self) -> Account | None:
        """The account of a model with one group."""
        return next(iter(self.by_index.values())) if len(self.by_index) == 1 else None

    def __len__(self) -> int:
        return sum(len(account.blocks) for account in self.by_index.values())

    def clear(self) -> None:
        for account in self.by_index.values():
            account.clear()

    def unit_of(self, tier: str) -> tuple[int, bool]:
        return self._units.get(tier, (self.unit, False))

    def find(self, engine_hash: EngineHash) -> Block | None:
        """The block of a hash in any group: a hash names a prefix whatever the group."""
        for account in self.by_index.values():
            block = account.blocks.get(engine_hash)
            if block is not None:
                return block
        return None

    def of(self, event: BlockStored, counts: Counter[str]) -> Account | None:
        """The event's account, new or known; None if the event is of no use."""
        self.misfit = False
        if event.block_tokens <= 0:
            counts["placeholder"] += 1
            return None
        self.heard(event.group)
        account = self.by_index.get(event.group or 0)
        if account is None:
            account = self._open(event)
        if account is None or event.lookahead:
            self._broken = self._broken or "its hashes cover tokens of the following block"
            counts["other_group"] += 1
            return None
        if event.block_tokens == account.block_tokens or self._grow(account, event):
            return account
        if event.kind is not None and account.block_tokens % event.block_tokens == 0:
            # A state or a tail inside a block; it is only reached at finer steps than we credit.
            counts["partial_entry"] += 1
            return None
        counts["other_block_size"] += 1
        self.misfit = True
        return None

    def _open(self, event: BlockStored) -> Account | None:
        rule = rule_of(event.kind, event.group)
        if rule is None:
            kind = (event.kind or "none")[:_KIND_CHARS]
            self._broken = f"it has a cache group of an unknown kind ({kind})"
        elif event.block_tokens % self.base:
            size = event.block_tokens
            self._broken = f"its block of {size} tokens is not a multiple of {self.base}"
        elif len(self.by_index) >= _MAX_GROUPS:
            self._broken = "it has too many cache groups"
        if rule is None or self._broken:
            return None
        account = Account(rule, event.block_tokens, event.window)
        self.reshaped = self.reshaped or bool(self.by_index)
        self.by_index[event.group or 0] = account
        self._reshape()
        return account

    def _grow(self, account: Account, event: BlockStored) -> bool:
        """What came before were entries inside a block, if this is the group's real block."""
        if event.kind is None or event.block_tokens % account.block_tokens:
            return False
        account.clear()
        account.block_tokens = event.block_tokens
        self.reshaped = True
        self._reshape()
        return True

    def _reshape(self) -> None:
        base = self.base
        classes = {
            index: GroupClass.of(each.rule, each.block_tokens, base, each.window)
            for index, each in self.by_index.items()
        }
        shape = Shape.of(classes.values())
        self._leaderless = shape.classes[0].rule != FULL
        if len(shape.classes) > _MAX_CLASSES:
            self._broken = "it has too many kinds of cache groups"
        self.unit = shape.unit
        self.named = {index: (account,) for index, account in self.by_index.items()}
        self.named[None] = tuple(self.by_index.values())
        plain = len(shape.classes) == 1
        for index, account in self.by_index.items():
            number = shape.classes.index(classes[index])
            account.label = DEVICE if plain else shape.label(DEVICE, number)
            account.siblings = tuple(
                self.by_index[other]
                for other, each in classes.items()
                if other != index and each == classes[index]
            )
            self._units[account.label] = (classes[index].unit, number > 0)

    def uncount(self, doubtful: Mapping[EngineHash, int]) -> Iterator[Remove]:
        """Forget second copies, and blocks of which no copy is left without the `doubtful` ones."""
        for account in self.by_index.values():
            gone = [
                (engine_hash, account.blocks[engine_hash])
                for engine_hash, copies in doubtful.items()
                if engine_hash in account.blocks
                and 0 < account.blocks[engine_hash].device <= copies
            ]
            for block in account.blocks.values():
                block.device = min(block.device, 1)
            for engine_hash, block in gone:
                block.device = 0
                if block.units:
                    yield account.removal(block, DEVICE)
                if not block.tiers:
                    account.drop(engine_hash, block)

    def held(self) -> Iterator[Store]:
        """Everything that counts now, class by class and tier by tier."""
        told: set[str] = set()
        for account in self.by_index.values():
            if account.label not in told:
                told.add(account.label)
                joint = [
                    block
                    for engine_hash, block in account.blocks.items()
                    if block.device and block.units and account.joint(engine_hash)
                ]
                yield from runs(account.label, joint, old=True)
        only = self.only
        if only is not None:
            blocks = list(only.blocks.values())
            for tier in sorted({tier for block in blocks for tier in block.tiers}):
                pooled = [b for b in blocks if tier in b.tiers and b.units]
                yield from runs(tier, pooled, old=True)


def _common(units: bytes, others: bytes) -> int:
    """Leading units that two blocks have in common."""
    at = 0
    while at < len(units) and units[at : at + HASH_BYTES] == others[at : at + HASH_BYTES]:
        at += HASH_BYTES
    return at // HASH_BYTES
