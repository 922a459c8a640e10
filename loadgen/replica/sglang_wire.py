"""KV events as SGLang puts them on the wire: one BlockStored per page, signed 64-bit hashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from loadgen.replica.events import BlockRemoved, BlocksStored, KVEvent
from loadgen.replica.wire import EventEncoding, adapter_id

_MEDIUM = "GPU"


class SglangEncoder:
    """Turns the events of one engine step into one payload; maps since 2026, arrays before."""

    def __init__(self, encoding: EventEncoding, rank: int) -> None:
        self._rank = rank
        self._maps = encoding is EventEncoding.MAP
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KVEvent], timestamp_s: float) -> bytes:
        """The payload frame; `timestamp_s` is Unix time."""
        listed = [fields for event in events for fields in _wire_events(event)]
        shaped = listed if self._maps else [_positional(fields) for fields in listed]
        return self._encoder.encode([timestamp_s, shaped, self._rank])


def _wire_events(event: KVEvent) -> Iterator[dict[str, Any]]:
    if isinstance(event, BlocksStored):
        yield from _pages(event)
    elif isinstance(event, BlockRemoved):
        hashes = [_signed(event.hash)]
        yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}
    else:
        yield {"type": "AllBlocksCleared"}


def _pages(event: BlocksStored) -> Iterator[dict[str, Any]]:
    size = event.block_size_tokens
    extra = {
        "cache_salt": event.salt,
        "session_id": event.session_id,
        "lora_name": event.adapter,
    }
    given = {name: value for name, value in extra.items() if value}
    parent = event.parent
    for page, block_hash in enumerate(event.hashes):
        yield {
            "type": "BlockStored",
            "block_hashes": [_signed(block_hash)],
            "parent_block_hash": None if parent is None else _signed(parent),
            "token_ids": event.token_ids[page * size : (page + 1) * size],
            "block_size": size,
            "lora_id": adapter_id(event.adapter),
            "medium": _MEDIUM,
            **given,
        }
        parent = block_hash


def _positional(fields: dict[str, Any]) -> list[Any]:
    """The older layout, which ends with the medium."""
    last = list(fields).index("medium") if "medium" in fields else 0
    return list(fields.values())[: last + 1]


def _signed(block_hash: int) -> int:
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash
