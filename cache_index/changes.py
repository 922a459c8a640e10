"""What Redis says about its nodes: entries of the change stream, nodes, holder records.

The layouts are those at the top of `functions.lua`. All changes state what is so now, not what is
different, so applying one twice does no harm.
"""

from __future__ import annotations

import struct
from typing import Final

from cache_index.blocks import HASH_BYTES
from cache_index.errors import RadixInconsistent
from cache_index.groups import part_of
from cache_index.radix import HolderRecord, RadixIndex
from cache_index.types import Holder, SourceKey

__all__ = ["PART", "apply_changes", "holder_record", "load_node", "source_name", "source_of"]

_NODE_HEAD: Final = struct.Struct("<BBHI8s")
_ENTRY: Final = struct.Struct("<4sQ")
_MASK: Final = struct.Struct("<8s4sQ")
_U16: Final = struct.Struct("<H")
_HOLDER_ID_BYTES = 4
PART: Final = 0x8000
"""In a record's unit: this holder alone leads no match, it is another cache group's part of one."""


def source_name(key: SourceKey) -> bytes:
    """A source as Redis knows it."""
    return f"{key.rank}:{key.replica}".encode()


def source_of(name: bytes) -> SourceKey:
    """The inverse of `source_name`."""
    rank, _, replica = name.decode().partition(":")
    return SourceKey(replica, int(rank))


def holder_record(record: bytes) -> HolderRecord:
    """A holder as Redis describes it."""
    unit, tier_bytes = struct.unpack_from("<HH", record)
    tier, number, shape = part_of(record[4 : 4 + tier_bytes].decode())
    key = source_of(record[4 + tier_bytes :])
    unit = max(1, unit & ~PART)
    return HolderRecord(Holder(key.replica, key.rank, tier), unit, number, shape)


def load_node(radix: RadixIndex, node_id: bytes, value: bytes) -> None:
    """Take a whole node from a snapshot."""
    _, _, holders, _, _ = _NODE_HEAD.unpack_from(value)
    run_at = _NODE_HEAD.size + holders * _ENTRY.size
    radix.extend(node_id, 0, value[run_at:])
    for offset in range(_NODE_HEAD.size, run_at, _ENTRY.size):
        holder_id, mask = _ENTRY.unpack_from(value, offset)
        radix.set_mask(node_id, holder_id, mask)


def apply_changes(radix: RadixIndex, data: bytes) -> None:
    """Apply one entry of the change stream. Raises RadixInconsistent."""
    at = 0
    end = len(data)
    while at < end:
        kind = data[at : at + 1]
        at += 1
        if kind == b"B":
            radix.set_mask(*_MASK.unpack_from(data, at))
            at += _MASK.size
        elif kind == b"U":
            at = _extend(radix, data, at)
        elif kind == b"X":
            radix.delete(data[at : at + HASH_BYTES])
            at += HASH_BYTES
        elif kind == b"H":
            at = _holder(radix, data, at)
        elif kind == b"D":
            radix.drop_holder(data[at : at + _HOLDER_ID_BYTES])
            at += _HOLDER_ID_BYTES
        else:
            raise RadixInconsistent(f"unknown change {kind!r}")


def _extend(radix: RadixIndex, data: bytes, at: int) -> int:
    start, count = data[at + HASH_BYTES], data[at + HASH_BYTES + 1]
    hashes_at = at + HASH_BYTES + 2
    end = hashes_at + count * HASH_BYTES
    radix.extend(data[at : at + HASH_BYTES], start, data[hashes_at:end])
    return end


def _holder(radix: RadixIndex, data: bytes, at: int) -> int:
    record_at = at + _HOLDER_ID_BYTES + _U16.size
    length: int = _U16.unpack_from(data, at + _HOLDER_ID_BYTES)[0]
    record = holder_record(data[record_at : record_at + length])
    radix.add_holder(data[at : at + _HOLDER_ID_BYTES], record)
    return record_at + length
