"""Stores whose parent is unknown, because what came before has left the replay buffer.

The rule: an orphan is bound to a prompt in flight at its rank if the prompt's tokens at that place
are the orphan's, and if the names that the engine must have given to the prompt's blocks, computed
from the prompt's first token, salt included, are the orphan's own name and its parent's. Tokens
alone prove nothing: the same document may stand behind another beginning, under another salt, sent
by another gateway. The engine's name covers all of that, so a bound orphan is never another prefix.

An engine stores a block only while the request that computed it holds all blocks before it. So the
beginning of a bound orphan's prompt is held too, once at least; and its removal will be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_index.accounts import Account
from cache_index.blocks import HASH_BYTES, TOKEN_BYTES
from cache_index.event_types import BlockStored, EngineHash
from cache_index.flights import Flight, RankFlights
from cache_index.operations import Block
from cache_index.proof import Scheme, Schemes, same

__all__ = ["Orphans"]

# Of one batch: names computed, and prompts looked at. What is over is not bound this time.
_MAX_NAMES = 1024
_MAX_PROMPTS = 64
_MAX_PLACES = 4


class Orphans:
    """Binds orphans of one life. `prompts` finds what is in flight at the rank now."""

    def __init__(self, base_unit_tokens: int, prompts: Callable[[], RankFlights | None]) -> None:
        self._base = base_unit_tokens
        self._prompts = prompts
        self._schemes = Schemes()
        self._budget = _MAX_NAMES

    def begin_batch(self) -> None:
        self._budget = _MAX_NAMES

    def remember(self, event: BlockStored, salt: str) -> None:
        """A store from its first block on: it shows how the engine names blocks."""
        first = event.tokens[: event.block_tokens * TOKEN_BYTES]
        self._schemes.remember(event.hashes[0], first, salt)

    def find(self, account: Account, event: BlockStored) -> list[tuple[EngineHash, Block]]:
        """The blocks before an orphan, the first one first; empty if it stays one."""
        rank = self._prompts()
        if rank is None or not event.hashes or event.lora_id is not None or event.lora_name:
            return []
        step = event.block_tokens * TOKEN_BYTES
        block = event.tokens[:step]
        if len(block) < step:
            return []
        for flight in rank.prompts(_MAX_PROMPTS):
            for place in _places(flight.tokens, block, step):
                for scheme in self._schemes.candidates(flight.salt):
                    names = self._names(flight, scheme, event.block_tokens, place + 1)
                    if _proves(names, place, event):
                        return self._before(account, flight, names[:place], event)
        return []

    def _names(
        self, flight: Flight, scheme: Scheme, block_tokens: int, upto: int
    ) -> Sequence[bytes]:
        known = flight.names.setdefault((scheme, block_tokens), [])
        upto = min(upto, len(known) + max(self._budget, 0))
        if len(known) < upto:
            self._budget -= upto - len(known)
            scheme.names(flight.tokens, block_tokens, flight.salt, known, upto)
        return known

    def _before(
        self, account: Account, flight: Flight, names: Sequence[bytes], event: BlockStored
    ) -> list[tuple[EngineHash, Block]]:
        """The prompt's blocks up to the orphan, under the engine's names."""
        width = event.block_tokens // self._base * HASH_BYTES
        if len(flight.hashes) < len(names) * width:
            return []
        found: list[tuple[EngineHash, Block]] = []
        parent: Block | None = None
        whole = isinstance(event.hashes[0], bytes)
        for at, digest in enumerate(names):
            name = digest if whole else int.from_bytes(digest[-8:], "big")
            block = account.blocks.get(name)
            if block is None:
                block = Block(flight.hashes[at * width : (at + 1) * width], parent)
            found.append((name, block))
            parent = block
        return found


def _places(tokens: bytes, block: bytes, step: int) -> list[int]:
    """Where in a prompt these tokens are whole blocks, but its first: that has no parent."""
    found: list[int] = []
    at = tokens.find(block, step)
    while at >= 0 and len(found) < _MAX_PLACES:
        if at % step == 0:
            found.append(at // step)
        at = tokens.find(block, at + TOKEN_BYTES)
    return found


def _proves(names: Sequence[bytes], place: int, event: BlockStored) -> bool:
    if len(names) <= place or event.parent is None:
        return False
    return same(event.hashes[0], names[place]) and same(event.parent, names[place - 1])
