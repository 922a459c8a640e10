"""KV events as engines publish them, decoded into typed events.

A message has three frames: topic, sequence (8 bytes, big endian) and a msgpack payload
`[timestamp, events, rank]`. Events came as arrays with the tag first until vLLM 0.23 and come as
maps with the key `type` since; fields were appended over time. Unknown tags and fields are counted
and passed over, so that a newer engine does not stop the index; a known event with unusable content
is counted too, because what it said is lost and the source can no longer be called exact.

Where SGLang differs: hashes are signed; an array may end in a map of what else is known; hybrid
models name a component in place of a group; with EAGLE each token comes with its successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from cache_index.blocks import pack_tokens
from cache_index.errors import MalformedBatch
from cache_index.event_shapes import Tally, named_fields
from cache_index.event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    EventBatch,
)

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

SEQ_BYTES = 8
END_OF_REPLAY = -1
END_FRAME = END_OF_REPLAY.to_bytes(SEQ_BYTES, "big", signed=True)
_U64 = (1 << 64) - 1

# SGLang's components of a hybrid model, as the groups and kinds that vLLM would name. Where in a
# run of pages the state is, a mamba component does not say.
_COMPONENTS = {
    "full": (0, "full_attention"),
    "swa": (1, "sliding_window"),
    "mamba": (2, "mamba_component"),
}
_OTHER_COMPONENT = 3


def payload_digest(payload: bytes) -> int:
    """Tells two batches with the same sequence number apart."""
    return int(xxhash.xxh3_64_intdigest(payload))


def decode_seq(frame: bytes) -> int:
    """A sequence frame; -1 marks an end. Raises MalformedBatch."""
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
    tally = Tally()
    events = [event for item in raw[1] if (event := _event(item, tally)) is not None]
    return EventBatch(
        timestamp_s=float(timestamp),
        events=events,
        rank=rank if isinstance(rank, int) else None,
        malformed=tally.malformed,
        unknown_tags=tally.tags,
        unknown_fields=tally.fields,
    )


def _event(item: object, tally: Tally) -> Event | None:
    try:
        tag, fields = named_fields(item, tally)
        if tag == "BlockRemoved":
            return _removed(fields)
        if tag == "BlockStored":
            return _stored(fields)
    except (KeyError, TypeError, ValueError, OverflowError):
        tally.malformed += 1
        return None
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    tally.tags += 1
    return None


def _removed(fields: Mapping[str, Any]) -> BlockRemoved:
    # One event per block: by far the most frequent of all.
    group = fields.get("group_idx")
    if "component_type" in fields:
        group, _ = _component(fields["component_type"])
    medium = fields.get("medium")
    if medium is not None and type(medium) is not str:
        raise TypeError("expected text")
    return BlockRemoved(
        _hashes(fields["block_hashes"]), medium, group if group is None else _number(group)
    )


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    get = fields.get
    block_tokens = fields["block_size"]
    if type(block_tokens) is not int or block_tokens < 0:
        raise ValueError("block_size")
    parent, keys = get("parent_block_hash"), get("extra_keys")
    group, kind = get("group_idx"), get("kv_cache_spec_kind")
    if "component_type" in fields:
        group, kind = _component(fields["component_type"])
    return BlockStored(
        hashes=_hashes(fields["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        tokens=_tokens(fields["token_ids"]),
        block_tokens=block_tokens,
        medium=_text(get("medium")),
        lora_id=_number(get("lora_id")),
        lora_name=_text(get("lora_name")),
        extra_keys=None if keys is None else _extra_keys(keys),
        group=_number(group),
        kind=_text(kind),
        cache_salt=_text(get("cache_salt")),
        window=_number(get("kv_cache_spec_sliding_window")),
        lookahead=_any_tokens(get("lookahead_token_ids")),
        reused=get("origin") == "REUSED",
    )


def _any_tokens(value: object) -> bool:
    """Whether a list of lists has anything in it; most engines send none at all."""
    if value is None:
        return False
    if type(value) is not list:
        raise TypeError("lookahead_token_ids is an array")
    return any(value)


def _component(name: object) -> tuple[int | None, str | None]:
    if name is None:
        return None, None
    if type(name) is not str:
        raise TypeError("a component has a name")
    return _COMPONENTS.get(name, (_OTHER_COMPONENT, name))


def _tokens(value: object) -> bytes:
    """Packed token ids. With EAGLE each comes with its successor: `[[a, b], [b, c]]`.

    The last successor is not kept, so a prompt that differs from there on is credited with one
    block more than the engine will reuse.
    """
    if type(value) is not list:
        raise TypeError("token_ids is an array")
    if value and type(value[0]) is list:
        return pack_tokens([first for first, _ in value])
    return pack_tokens(value)


def _hash(value: object) -> EngineHash:
    """SGLang writes as a signed number what vLLM writes as an unsigned one."""
    if type(value) is int:
        return value & _U64
    if type(value) is bytes:
        return value
    raise TypeError("a block hash is an integer or bytes")


def _hashes(value: object) -> list[EngineHash]:
    if type(value) is not list:
        raise TypeError("block_hashes is an array")
    return [item & _U64 if type(item) is int else _hash(item) for item in value]


def _text(value: object) -> str | None:
    if value is None or type(value) is str:
        return value
    raise TypeError("expected text")


def _number(value: object) -> int | None:
    if value is None or type(value) is int:
        return value
    raise TypeError("expected a number")


def _extra_keys(value: object) -> list[list[Any] | None]:
    if type(value) is not list:
        raise TypeError("extra_keys is an array")
    for item in value:
        if item is not None and type(item) is not list:
            raise TypeError("extra_keys has an array or nothing per block")
    return value
