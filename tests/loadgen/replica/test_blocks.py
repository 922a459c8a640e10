from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.replica.blocks import BlockPool


class NaivePool:
    """What the pool must do, by lists and linear search."""

    def __init__(self, blocks: int) -> None:
        self.order = list(range(blocks))
        self.refs = Counter[int]()
        self.content: dict[int, int] = {}
        self.removed: list[int] = []

    def take(self, count: int) -> list[int]:
        taken, self.order = self.order[:count], self.order[count:]
        for block in taken:
            if block in self.content:
                self.removed.append(self.content.pop(block))
            self.refs[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
        left = [block for block in reversed(blocks) if not self.refs[block]]
        useless = [block for block in left if block not in self.content]
        self.order = [*useless, *self.order, *(b for b in left if b in self.content)]

    def oldest(self, block_hash: int) -> list[int]:
        return [block for block, held in self.content.items() if held == block_hash][:1]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pool_agrees_with_a_naive_one(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    removed: list[int] = []
    pool, naive = BlockPool(size, removed.append), NaivePool(size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.give_back(blocks)
            naive.give_back(blocks)
        else:
            count = data.draw(st.integers(0, pool.free))
            blocks = pool.take(count)
            assert blocks == naive.take(count)
            # The last of them may not be filled.
            hashes = data.draw(st.lists(st.integers(1, 6), max_size=count))
            full = blocks[: len(hashes)]
            pool.store(full, hashes)
            naive.content.update(zip(full, hashes, strict=True))
            held.append(blocks)
        assert removed == naive.removed
        assert pool.hashes == frozenset(naive.content.values())
        assert pool.free == len(naive.order)
        assert pool.used + pool.free == size
        assert all(pool.find([h], 1) == naive.oldest(h) for h in range(1, 7))


def test_a_touched_block_is_not_reused() -> None:
    pool = BlockPool(2, lambda _hash: None)
    first = pool.take(1)
    pool.store(first, [11])
    pool.give_back(first)
    pool.touch(first)
    assert pool.take(1) != first
    assert pool.free == 0


def test_the_tail_of_a_sequence_goes_before_its_head() -> None:
    removed: list[int] = []
    pool = BlockPool(3, removed.append)
    blocks = pool.take(3)
    pool.store(blocks, [1, 2, 3])
    pool.give_back(blocks)
    pool.take(2)
    assert removed == [3, 2]


def test_reset_is_refused_while_blocks_are_used() -> None:
    pool = BlockPool(2, lambda _hash: None)
    blocks = pool.take(1)
    pool.store(blocks, [1])
    assert not pool.reset()
    pool.give_back(blocks)
    assert pool.reset()
    assert pool.hashes == frozenset()
