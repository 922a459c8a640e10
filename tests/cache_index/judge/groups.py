"""The rule of the match: which prefix can be reused, given what each KV group holds."""

from collections.abc import Callable
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
    blocks: list[Block], units: int, tier: str, groups: tuple[Group, ...], has: Has, slack: int
) -> int:
    """The longest prefix of `blocks` that can be reused from `tier`, in tokens.

    `slack` tokens are taken off each window: 0 is the whole window before the end of the match,
    1 leaves out the token that is computed next.
    """
    held = [[has(Place(tier, g, b)) for b in blocks] for g in range(len(groups))]
    block_tokens = units * UNIT_TOKENS
    for count in range(len(blocks), 0, -1):
        if all(_covers(g, held[i], count, block_tokens, slack) for i, g in enumerate(groups)):
            return count * block_tokens
    return 0


def _covers(group: Group, held: list[bool], count: int, block_tokens: int, slack: int) -> bool:
    if group.kind == FULL:
        return all(held[:count])
    if group.kind == RECURRENT:
        return held[count - 1]
    window = max((group.window_tokens or 0) - slack, 0)
    first = max(count * block_tokens - window, 0) // block_tokens
    return all(held[first:count])
