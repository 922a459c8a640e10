"""KV events as the engine core reports them, before any wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Full blocks of one request that became reusable in one step, in order.

    `parent` is the hash before the first of them, or None at the start of a prompt.
    `token_ids` holds the tokens of all of them, one after the other. `salt` is carried
    whether or not the first block is among them. `medium` is where the blocks are.
    """

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size_tokens: int
    salt: str
    adapter: str
    session_id: str = ""
    medium: str = "GPU"


class BlockRemoved(NamedTuple):
    """One block lost its content because its room was needed."""

    hash: int
    medium: str = "GPU"


class BlocksCleared(NamedTuple):
    """The whole prefix cache was reset."""


KVEvent = BlocksStored | BlockRemoved | BlocksCleared
