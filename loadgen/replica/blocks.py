"""The block cache of one rank: reference counts, content hashes and the order of reuse.

Free blocks keep their content until they are taken for something else. The order of reuse is
vLLM's: first blocks without content (an unfilled tail, just given back, before those that were
never used), then the least recently freed; a sequence gives its blocks back tail first, so that
its head, which others may share, survives longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice


class BlockPool:
    """`blocks` blocks; `on_removed(hash)` is called when content makes room.

    The same hash can sit in several blocks (a fully cached prompt recomputes its last block);
    each copy is stored and removed on its own, and lookups use the oldest copy.
    """

    def __init__(self, blocks: int, on_removed: Callable[[int], None]) -> None:
        self.blocks = blocks
        self._on_removed = on_removed
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._refs = [0] * blocks
        self._content: list[int | None] = [None] * blocks
        self._by_hash: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks nobody uses, with or without content."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks some request uses."""
        return self.blocks - len(self._free)

    @property
    def hashes(self) -> frozenset[int]:
        """Every content hash that a lookup can find now."""
        return frozenset(self._by_hash)

    def find(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`, at most `limit` of them."""
        by_hash = self._by_hash
        found: list[int] = []
        for block_hash in islice(hashes, limit):
            block = by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody uses: touching them takes that many free blocks."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def touch(self, blocks: Sequence[int]) -> None:
        """Use blocks that hold cached content."""
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Use `count` blocks for new content; the caller has checked `free`."""
        pop, refs, content = self._free.popitem, self._refs, self._content
        taken: list[int] = []
        for _ in range(count):
            block, _none = pop(last=False)
            if content[block] is not None:
                self._evict(block)
            refs[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user fewer for each block, the last of the sequence first."""
        refs, free, content = self._refs, self._free, self._content
        useless: list[int] = []
        for block in reversed(blocks):
            left = refs[block] - 1
            refs[block] = left
            if not left:
                free[block] = None
                if content[block] is None:
                    useless.append(block)
        for block in reversed(useless):
            free.move_to_end(block, last=False)

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Record the content of blocks that have just been filled."""
        content, by_hash = self._content, self._by_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            content[block] = block_hash
            if by_hash.setdefault(block_hash, block) != block:
                self._copies.setdefault(block_hash, []).append(block)

    def reset(self) -> bool:
        """Forget all content; refused (False) while any block is in use, as in vLLM."""
        if self.used:
            return False
        self._content = [None] * self.blocks
        self._by_hash.clear()
        self._copies.clear()
        return True

    def _evict(self, block: int) -> None:
        block_hash = self._content[block]
        assert block_hash is not None
        self._content[block] = None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._by_hash[block_hash]
        else:
            self._evict_copy(block, block_hash, copies)
        self._on_removed(block_hash)

    def _evict_copy(self, block: int, block_hash: int, copies: list[int]) -> None:
        if self._by_hash[block_hash] == block:
            self._by_hash[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[block_hash]
