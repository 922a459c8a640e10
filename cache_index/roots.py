"""Where a stored chain begins: the root that its adapter and salt name, or its parent's last hash.

What a request can say about itself is in the root: model, adapter, salt. Anything else in a block's
extra keys (images, prompt embeddings) is not in its tokens, so that block and all after it get no
credit. Engines before vLLM 0.19 send no extra keys, so their salted blocks look unsalted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache_index.event_types import BlockStored
from cache_index.identity import ModelIdentity, Root
from cache_index.operations import Block

__all__ = ["Roots", "other_keys"]

_MAX_ROOTS = 4096


class Roots:
    """The roots of one model; `salted` once a salt was seen, `salt` is the last chain's."""

    def __init__(self, model: ModelIdentity) -> None:
        self._model = model
        self._digests: dict[tuple[str, str], int] = {}
        self.salted = False
        self.salt = ""

    def seed(self, event: BlockStored, parent: Block | None) -> tuple[int, int]:
        """What the event's chain starts from, and how many of its blocks are tokens alone."""
        adapter = event.lora_name or ""
        if event.lora_id is not None and not adapter:
            return 0, 0
        keys = [other_keys(item, adapter) for item in event.extra_keys or ()]
        salt = event.cache_salt or ""
        if parent is None and keys and len(keys[0]) == 1 and isinstance(keys[0][0], str):
            salt, keys[0] = keys[0][0], []
        self.salted = self.salted or bool(salt)
        self.salt = salt
        plain = next((i for i, rest in enumerate(keys) if rest), len(event.hashes))
        return self._root(adapter, salt) if parent is None else parent.last, plain

    def _root(self, adapter: str, salt: str) -> int:
        key = (adapter, salt)
        if key not in self._digests:
            if len(self._digests) >= _MAX_ROOTS:
                self._digests.clear()
            self._digests[key] = Root(self._model, adapter, salt).digest()
        return self._digests[key]


def other_keys(keys: Sequence[Any] | None, adapter: str) -> list[Any]:
    """A block's extra keys without the adapter's name, which the event carries anyway."""
    rest = list(keys or ())
    if adapter and rest and rest[0] == adapter:
        del rest[0]
    return rest
