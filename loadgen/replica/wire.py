"""KV events as vLLM puts them on the wire: msgpack, in two encodings and two kinds of hash.

`map` is what vLLM sends from 0.24 on, with the fields of 0.33; `array` is what it sent
before, with the fields of 0.22, the last release of that kind. The batch around the events
is an array in both: `[timestamp, events, rank]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from loadgen.replica.events import BlockRemoved, BlocksStored, KVEvent
from loadgen.replica.hashing import hash_digest

_OWN = "GPU"
_GROUP = 0
_GROUP_KIND = "full_attention"
# A connector that announces a pool's blocks knows none of these.
_OF_OWN_BLOCKS = ("extra_keys", "group_idx", "kv_cache_spec_kind")
_BEFORE_EXTRA_KEYS = 8
"""Items of an array up to the adapter's name, with which releases before 0.19 end it."""

WireHash = int | bytes


class EventEncoding(StrEnum):
    """How one event is laid out."""

    MAP = "map"
    ARRAY = "array"


class HashForm(StrEnum):
    """How a block hash is written: 64-bit integer or 32-byte digest."""

    INT = "int"
    BYTES = "bytes"


class BatchEncoder:
    """Turns the events of one engine step into one payload.

    `extra_keys=False`: arrays as before 0.19, which do not tell a salt.
    """

    def __init__(
        self,
        encoding: EventEncoding,
        hash_form: HashForm,
        rank: int,
        *,
        extra_keys: bool = True,
    ) -> None:
        self._rank = rank
        arrays = _array_event if extra_keys else _short_array_event
        self._one = _map_event if encoding is EventEncoding.MAP else arrays
        self._hash: Callable[[int], WireHash] = _same if hash_form is HashForm.INT else hash_digest
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KVEvent], timestamp_s: float) -> bytes:
        """The payload frame; `timestamp_s` is Unix time."""
        listed = [self._one(event, self._hash) for event in events]
        return self._encoder.encode([timestamp_s, listed, self._rank])


def _same(block_hash: int) -> WireHash:
    return block_hash


def _map_event(event: KVEvent, wire: Callable[[int], WireHash]) -> dict[str, Any]:
    if isinstance(event, BlocksStored):
        stored = _stored_fields(event, wire)
        stored = {**stored, "session_id": event.session_id} if event.session_id else stored
        return stored if event.medium == _OWN else _without(stored, _OF_OWN_BLOCKS)
    if isinstance(event, BlockRemoved):
        removed = _removed_fields(event, wire)
        return removed if event.medium == _OWN else _without(removed, _OF_OWN_BLOCKS)
    return {"type": "AllBlocksCleared"}


def _stored_fields(event: BlocksStored, wire: Callable[[int], WireHash]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [wire(h) for h in event.hashes],
        "parent_block_hash": None if event.parent is None else wire(event.parent),
        "token_ids": event.token_ids,
        "block_size": event.block_size_tokens,
        "lora_id": adapter_id(event.adapter),
        "medium": event.medium,
        "lora_name": event.adapter or None,
        "extra_keys": _extra_keys(event),
        "group_idx": _GROUP,
        "kv_cache_spec_kind": _GROUP_KIND,
    }


def _removed_fields(event: BlockRemoved, wire: Callable[[int], WireHash]) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [wire(event.hash)],
        "medium": event.medium,
        "group_idx": _GROUP,
    }


def _without(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _array_event(event: KVEvent, wire: Callable[[int], WireHash]) -> list[Any]:
    if isinstance(event, BlocksStored):
        # The sliding window's width: always written in this encoding, nil for full attention.
        return [*_stored_fields(event, wire).values(), None]
    if isinstance(event, BlockRemoved):
        return [*_removed_fields(event, wire).values()]
    return ["AllBlocksCleared"]


def _short_array_event(event: KVEvent, wire: Callable[[int], WireHash]) -> list[Any]:
    return _array_event(event, wire)[:_BEFORE_EXTRA_KEYS]


def _extra_keys(event: BlocksStored) -> list[list[str] | None]:
    """Per block what went into its hash besides tokens: the adapter, and the salt once."""
    adapter = [event.adapter] if event.adapter else None
    keys: list[list[str] | None] = [adapter] * len(event.hashes)
    if event.salt and event.parent is None:
        keys[0] = [*(adapter or ()), event.salt]
    return keys


def adapter_id(adapter: str) -> int | None:
    """The number of an adapter in events."""
    # vLLM numbers adapters as they are loaded; a number that depends on the name alone is
    # enough for consumers, which are told to prefer the name.
    return sum(adapter.encode()) % 1000 + 1 if adapter else None
