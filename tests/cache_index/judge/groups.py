"""The rule of the match: which prefix can be reused, given what each KV group holds."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from tests.cache_index.judge.blocks import UNIT_TOKENS, Block

FULL, WINDOW, RECURRENT = "full_attention", "sliding_window", "mamba"


class Group(NamedTuple):
    """One KV group of a model."""

    kind: str = FULL
    window_tokens: int | None = None


class Place(NamedTuple):
    """Where a block is: tier (device, host), group, and the block."""

    tier: str
    group: int
    block: Block


Has = Callable[[Place], bool]


def prefix_tokens(
    blocks: Sequence[Block],
    units: int,
    tier: str,
    groups: tuple[Group, ...],
    has: Has,
    slack: int,
) -> int:
    """The longest prefix of `blocks` that can be reused from `tier`, in tokens.

    `slack` tokens are taken off each window: 0 is the whole window before the end of the match,
    1 leaves out the token that is computed next.
    """
    block_tokens = units * UNIT_TOKENS
    longest = len(blocks)
    for index, group in enumerate(groups):
        if group.kind == FULL:
            held = (has(Place(tier, index, block)) for block in blocks[:longest])
            longest = sum(1 for _ in takewhile(bool, held))
    states = [(g, i) for i, g in enumerate(groups) if g.kind != FULL]
    for count in range(longest, 0, -1):
        needed = (
            Place(tier, i, block)
            for group, i in states
            for block in blocks[_first_needed(group, count, block_tokens, slack) : count]
        )
        if all(has(place) for place in needed):
            return count * block_tokens
    return 0


def _first_needed(group: Group, count: int, block_tokens: int, slack: int) -> int:
    """The first of `count` blocks that a state group needs: its window's, or the last alone."""
    if group.kind == RECURRENT:
        return count - 1
    window = max((group.window_tokens or 0) - slack, 0)
    return max(count * block_tokens - window, 0) // block_tokens
