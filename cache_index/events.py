"""KV events as engines publish them, decoded into typed events.

A message has three frames: topic, sequence (8 bytes, big endian) and a msgpack payload
`[timestamp, events, rank]`. Events came as arrays with the tag first until vLLM 0.23 and come as
maps with the key `type` since; fields were appended over time. Unknown tags and fields are counted
and passed over, so that a newer engine does not stop the index; a known event with unusable content
is counted too, because what it said is lost and the source can no longer be called exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from cache_index.blocks import TOKEN_BYTES, pack_tokens
from cache_index.errors import MalformedBatch

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EngineHash",
    "Event",
    "EventBatch",
    "decode_batch",
    "decode_seq",
    "payload_digest",
]

EngineHash = int | bytes
SEQ_BYTES = 8
END_OF_REPLAY = -1

# In the order of the array encoding; the map encoding uses the same names.
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": _STORED_FIELDS,
    "BlockRemoved": _REMOVED_FIELDS,
    "AllBlocksCleared": (),
}
# SGLang sends some of vLLM's facts under names of its own.
_KNOWN_EXTRA = frozenset({"type", "cache_salt"})


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that became reusable. `tokens` is u32 little endian, all blocks one after another.

    `extra_keys` has one entry per block, None where the wire has no such field.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: bytes
    block_tokens: int
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group: int | None = None
    kind: str | None = None
    cache_salt: str | None = None

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can no longer be reused."""

    hashes: Sequence[EngineHash]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine's prefix cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One published message. The counters say what of it could not be used."""

    timestamp_s: float
    events: list[Event]
    rank: int | None
    malformed: int = 0
    unknown_tags: int = 0
    unknown_fields: int = 0


@dataclass(slots=True)
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)


def payload_digest(payload: bytes) -> int:
    """Tells two batches with the same sequence number apart."""
    return int(xxhash.xxh3_64_intdigest(payload))


def decode_seq(frame: bytes) -> int:
    """A sequence frame; -1 marks the end of a replay. Raises MalformedBatch."""
    if len(frame) != SEQ_BYTES:
        raise MalformedBatch("sequence")
    return int.from_bytes(frame, "big", signed=True)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload. Raises MalformedBatch and nothing else, whatever the bytes are."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        raise MalformedBatch("msgpack") from None
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise MalformedBatch("batch")
    timestamp = raw[0]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise MalformedBatch("timestamp")
    rank = raw[2] if len(raw) > 2 else None
    tally = _Tally()
    events = [event for item in raw[1] if (event := _event(item, tally)) is not None]
    return EventBatch(
        timestamp_s=float(timestamp),
        events=events,
        rank=rank if isinstance(rank, int) else None,
        malformed=tally.counts["malformed"],
        unknown_tags=tally.counts["tag"],
        unknown_fields=tally.counts["field"],
    )


def _event(item: object, tally: _Tally) -> Event | None:
    try:
        return _typed(item, tally)
    except (KeyError, TypeError, ValueError, OverflowError):
        tally.counts["malformed"] += 1
        return None


def _typed(item: object, tally: _Tally) -> Event | None:
    tag, fields = _named_fields(item, tally)
    match tag:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return BlockRemoved(
                hashes=_hashes(fields["block_hashes"]),
                medium=_text(fields.get("medium")),
                group=_number(fields.get("group_idx")),
            )
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case _:
            tally.counts["tag"] += 1
            return None


def _named_fields(item: object, tally: _Tally) -> tuple[str, Mapping[str, Any]]:
    """The tag and the fields by name, from either encoding."""
    if isinstance(item, dict):
        tag = item.get("type")
        if not isinstance(tag, str):
            raise TypeError("an event without a tag")
        names = _FIELDS.get(tag)
        if names is not None:
            known = len(item.keys() & set(names)) + len(item.keys() & _KNOWN_EXTRA)
            tally.counts["field"] += len(item) - known
        return tag, item
    if isinstance(item, list) and item and isinstance(item[0], str):
        names = _FIELDS.get(item[0], ())
        if item[0] in _FIELDS:
            tally.counts["field"] += max(0, len(item) - 1 - len(names))
        return item[0], dict(zip(names, item[1:], strict=False))
    raise TypeError("an event that is neither a map nor a tagged array")


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    block_tokens = fields["block_size"]
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 0:
        raise ValueError("block_size")
    parent = fields.get("parent_block_hash")
    return BlockStored(
        hashes=_hashes(fields["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        tokens=pack_tokens(_list(fields["token_ids"])),
        block_tokens=block_tokens,
        medium=_text(fields.get("medium")),
        lora_id=_number(fields.get("lora_id")),
        lora_name=_text(fields.get("lora_name")),
        extra_keys=_extra_keys(fields.get("extra_keys")),
        group=_number(fields.get("group_idx")),
        kind=_text(fields.get("kv_cache_spec_kind")),
        cache_salt=_text(fields.get("cache_salt")),
    )


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected an array")
    return value


def _hash(value: object) -> EngineHash:
    if isinstance(value, bytes) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError("a block hash is an integer or bytes")


def _hashes(value: object) -> list[EngineHash]:
    return [_hash(item) for item in _list(value)]


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError("expected text")


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError("expected a number")


def _extra_keys(value: object) -> list[list[Any] | None] | None:
    if value is None:
        return None
    keys = _list(value)
    if all(item is None or isinstance(item, list) for item in keys):
        return keys
    raise TypeError("extra_keys has an array or nothing per block")
