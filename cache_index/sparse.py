"""Stores of groups that skip blocks: windows and recurrent states.

Such an event has the tokens of a whole stretch but only the hashes of the blocks that were kept,
and does not say which those are. A hash names a prefix whatever the group, so the other groups'
blocks of the same batch say it. What lies between two hashes that are known, and is as many as
there is room for, is known too. Anything else stays out, which under-reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from cache_index.accounts import Account, Accounts
from cache_index.blocks import HASH_BYTES, chain_packed
from cache_index.event_types import BlockRemoved, BlockStored, EngineHash
from cache_index.groups import STATE
from cache_index.operations import Block
from cache_index.roots import Roots

__all__ = ["Sparse"]

Placed = list[tuple[EngineHash, Block]]


class Sparse:
    """Events of one batch that wait for the batch's end."""

    def __init__(self, accounts: Accounts, roots: Roots) -> None:
        self._accounts = accounts
        self._roots = roots
        self.waiting: list[tuple[Account, BlockStored]] = []

    def clear(self) -> None:
        self.waiting.clear()

    def add(self, account: Account, event: BlockStored) -> None:
        self.waiting.append((account, event))

    def take(self) -> list[tuple[Account, BlockStored]]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def waits_for(self, event: BlockRemoved) -> bool:
        """Whether a removal is about a block whose store still waits."""
        return any(not set(event.hashes).isdisjoint(stored.hashes) for _, stored in self.waiting)

    def place(self, account: Account, event: BlockStored) -> Placed:
        """The blocks of an event whose place is known, in their order."""
        twins = [self._twin(account, engine_hash) for engine_hash in event.hashes]
        if all(twins):
            return [
                (name, _block(account, twin.units, twin.parent))
                for name, twin in zip(event.hashes, twins, strict=True)
                if twin is not None
            ]
        return self._by_tokens(account, event)

    def _twin(self, account: Account, engine_hash: EngineHash) -> Block | None:
        """A block of another group that is exactly the block this hash names."""
        for other in self._accounts.by_index.values():
            if other.block_tokens != account.block_tokens:
                continue
            block = other.blocks.get(engine_hash)
            # A state's block has only its last unit.
            whole = other.rule != STATE or account.rule == STATE
            if block is not None and block.units and whole:
                return block
        return None

    def _by_tokens(self, account: Account, event: BlockStored) -> Placed:
        parent = None if event.parent is None else self._accounts.find(event.parent)
        if event.parent is not None and (parent is None or not parent.units):
            return []
        seed, plain = self._roots.seed(event, parent)
        total = event.token_count // event.block_tokens
        chain = chain_packed(seed, event.tokens, self._accounts.base)
        width = event.block_tokens // self._accounts.base * HASH_BYTES
        ends = {chain[(at + 1) * width - HASH_BYTES : (at + 1) * width]: at for at in range(total)}
        known: list[tuple[int, int]] = []
        for number, engine_hash in enumerate(event.hashes):
            block = self._accounts.find(engine_hash)
            at = ends.get(block.units[-HASH_BYTES:]) if block is not None else None
            if at is not None:
                known.append((number, at))
        if parent is None and not known and len(event.hashes) != total:
            # Without its first block a chain does not even say its salt.
            return []
        start, end = (-1, -1), (len(event.hashes), total)
        known = [start, *known, *([end] if plain == len(event.hashes) else [])]
        return _cut(account, event, chain, width, dict(_filled(known)), parent)


def _filled(known: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Hash numbers with their places: those known, and those between that leave no choice."""
    yield from known
    for (number, at), (following, end) in pairwise(known):
        if following - number == end - at:
            for step in range(1, following - number):
                yield number + step, at + step


def _cut(
    account: Account,
    event: BlockStored,
    chain: bytes,
    width: int,
    places: dict[int, int],
    parent: Block | None,
) -> Placed:
    placed: Placed = []
    done = 0
    for number, at in sorted(places.items()):
        if not 0 <= number < len(event.hashes):
            continue
        start = at * width
        if start > done:
            # Blocks that were not kept lead to the next one.
            parent = Block(chain[done:start], parent)
        block = _block(account, chain[start : start + width], parent)
        placed.append((event.hashes[number], block))
        parent, done = block, start + width
    return placed


def _block(account: Account, units: bytes, parent: Block | None) -> Block:
    """A block of a group; a state is at one place, so that only its last unit is marked."""
    if account.rule != STATE or len(units) == HASH_BYTES:
        return Block(units, parent)
    return Block(units[-HASH_BYTES:], Block(units[:-HASH_BYTES], parent))
