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
_U64 = (1 << 64) - 1

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
_OF_SGLANG = frozenset({"type", "cache_salt", "metadata", "component_type", "attn_dp_rank"})
# Proposed for vLLM: why a block is announced.
_PROPOSED = frozenset({"origin"})
_KNOWN = {tag: frozenset(names) | _OF_SGLANG | _PROPOSED for tag, names in _FIELDS.items()}
# Where an array of SGLang may have its map; vLLM has text and an array there, or nothing.
_METADATA_AT = range(7, 10)
# SGLang's components of a hybrid model, as the groups and kinds that vLLM would name. Where in a
# run of pages the state is, a mamba component does not say.
_COMPONENTS = {
    "full": (0, "full_attention"),
    "swa": (1, "sliding_window"),
    "mamba": (2, "mamba_component"),
}
_OTHER_COMPONENT = 3


class _Tally:
    """What of one batch could not be used."""

    __slots__ = ("fields", "malformed", "tags")

    def __init__(self) -> None:
        self.malformed = self.tags = self.fields = 0


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
    tally = _Tally()
    events = [event for item in raw[1] if (event := _event(item, tally)) is not None]
    return EventBatch(
        timestamp_s=float(timestamp),
        events=events,
        rank=rank if isinstance(rank, int) else None,
        malformed=tally.malformed,
        unknown_tags=tally.tags,
        unknown_fields=tally.fields,
    )


def _event(item: object, tally: _Tally) -> Event | None:
    try:
        tag, fields = _named_fields(item, tally)
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


def _named_fields(item: object, tally: _Tally) -> tuple[str, Mapping[str, Any]]:
    """The tag and the fields by name, from either encoding."""
    if type(item) is dict:
        tag = item["type"]
        if type(tag) is not str:
            raise TypeError("an event without a tag")
        known = _KNOWN.get(tag)
        if known is not None and not item.keys() <= known:
            tally.fields += len(item.keys() - known)
        return tag, _flat(item, tally) if "metadata" in item else item
    if type(item) is list and item and type(item[0]) is str:
        return item[0], _from_array(item, tally)
    raise TypeError("an event that is neither a map nor a tagged array")


def _from_array(item: list[Any], tally: _Tally) -> Mapping[str, Any]:
    names = _FIELDS.get(item[0])
    if names is None:
        return {}
    given = dict(zip(names, item[1:], strict=False))
    if item[0] == "BlockStored":
        at = next((at for at in _METADATA_AT if at < len(item) and type(item[at]) is dict), None)
        if at is not None or _is_component(item):
            return _from_sglang(item, at, tally)
    elif type(given.get("group_idx")) is str:
        given["component_type"] = given.pop("group_idx")
    tally.fields += max(0, len(item) - 1 - len(names))
    return given


def _is_component(item: list[Any]) -> bool:
    """Where vLLM has an adapter's name, with its number before it."""
    return len(item) == _METADATA_AT[1] and item[5] is None and item[7] in _COMPONENTS


def _from_sglang(item: list[Any], at: int | None, tally: _Tally) -> Mapping[str, Any]:
    """An array of SGLang: up to the medium as in vLLM, then a component, then a map."""
    given = dict(zip(_STORED_FIELDS, item[1:7], strict=False))
    if at != _METADATA_AT[0] and type(item[7]) is str:
        given["component_type"] = item[7]
    if at is None:
        return given
    tally.fields += len(item) - at - 1
    return _flat({**given, "metadata": item[at]}, tally)


def _flat(fields: Mapping[str, Any], tally: _Tally) -> Mapping[str, Any]:
    """The fields of an inner map beside those around it."""
    inner = fields["metadata"]
    if inner is None:
        return fields
    if type(inner) is not dict:
        raise TypeError("metadata is a map")
    tally.fields += len(inner.keys() - _KNOWN["BlockStored"])
    return {**inner, **{name: value for name, value in fields.items() if value is not None}}


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
