"""An event's tag and its fields by name, whichever encoding it came in.

Arrays have the tag first and their fields in the order of the maps' names. SGLang's may end in a
map of what else is known, after the name of a component in hybrid models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["COMPONENTS", "Tally", "named_fields"]

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
# SGLang's components of a hybrid model.
COMPONENTS = frozenset({"full", "swa", "mamba"})


class Tally:
    """What of one batch could not be used."""

    __slots__ = ("fields", "malformed", "tags")

    def __init__(self) -> None:
        self.malformed = self.tags = self.fields = 0


def named_fields(item: object, tally: Tally) -> tuple[str, Mapping[str, Any]]:
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


def _from_array(item: list[Any], tally: Tally) -> Mapping[str, Any]:
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
    return len(item) == _METADATA_AT[1] and item[5] is None and item[7] in COMPONENTS


def _from_sglang(item: list[Any], at: int | None, tally: Tally) -> Mapping[str, Any]:
    """An array of SGLang: up to the medium as in vLLM, then a component, then a map."""
    given = dict(zip(_STORED_FIELDS, item[1:7], strict=False))
    if at != _METADATA_AT[0] and type(item[7]) is str:
        given["component_type"] = item[7]
    if at is None:
        return given
    tally.fields += len(item) - at - 1
    return _flat({**given, "metadata": item[at]}, tally)


def _flat(fields: Mapping[str, Any], tally: Tally) -> Mapping[str, Any]:
    """The fields of an inner map beside those around it."""
    inner = fields["metadata"]
    if inner is None:
        return fields
    if type(inner) is not dict:
        raise TypeError("metadata is a map")
    tally.fields += len(inner.keys() - _KNOWN["BlockStored"])
    return {**inner, **{name: value for name, value in fields.items() if value is not None}}
