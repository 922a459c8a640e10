"""The wire: every generation, everything recorded, and anything at all."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index import MalformedBatch, pack_tokens
from cache_index.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_seq,
)

from .captures import NAMES, messages
from .publisher import as_array, encode, removed, stored

ARRAYS = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f726564920b0cc0940102030402c0a347505593ac426c6f636b52"
    "656d6f766564910ba347505591b0416c6c426c6f636b73436c656172656400"
)
MAPS = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c083a474797065ac426c6f636b52656d6f766564"
    "ac626c6f636b5f686173686573910ba66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172"
    "6564"
    "00"
)


@pytest.mark.parametrize("payload", [ARRAYS, MAPS], ids=["arrays", "maps"])
def test_both_encodings_of_one_batch(payload: bytes) -> None:
    batch = decode_batch(payload)
    assert batch.timestamp_s == 1.5
    assert batch.rank == 0
    assert batch.events == [
        BlockStored([11, 12], None, pack_tokens([1, 2, 3, 4]), 2, "GPU"),
        BlockRemoved([11], "GPU"),
        AllBlocksCleared(),
    ]
    assert (batch.malformed, batch.unknown_tags, batch.unknown_fields) == (0, 0, 0)


@pytest.mark.parametrize("fields", range(5, 16))
def test_every_length_of_the_array_encoding(fields: int) -> None:
    values: list[Any] = [
        *([b"h1"], b"h0", [1, 2], 2, None, "GPU", None, [["salt"]], 0, "full_attention"),
        *(None, "LOCAL", None, "session", [3]),
    ]
    batch = decode_batch(encode([["BlockStored", *values[: max(4, fields)]]]))
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.hashes == [b"h1"]
    assert event.extra_keys == ([["salt"]] if fields > 7 else None)
    assert (batch.malformed, batch.unknown_fields) == (0, 0)


def test_the_newest_fields_are_known_in_both_encodings() -> None:
    extra = {"locality": "LOCAL", "ownership": None, "session_id": "s", "lookahead_token_ids": [1]}
    batch = decode_batch(encode([stored([1], [1], block_size=1) | extra]))
    assert batch.unknown_fields == 0


def test_what_is_new_is_counted_and_passed_over() -> None:
    batch = decode_batch(
        encode(
            [
                {"type": "BlockMoved", "whatever": 1},
                ["BlockMoved", 1, 2],
                removed([1]) | {"colour": "red"},
                [*as_array(removed([2])), None, None, None, "new"],
            ]
        )
    )
    assert [event.hashes for event in batch.events if isinstance(event, BlockRemoved)] == [[1], [2]]
    assert (batch.malformed, batch.unknown_tags, batch.unknown_fields) == (0, 2, 2)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockRemoved"},
        {"type": "BlockRemoved", "block_hashes": [1.5]},
        {"type": "BlockRemoved", "block_hashes": [True]},
        {"type": "BlockRemoved", "block_hashes": 7},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": 3},
        {"no": "type"},
        {"type": 3},
        stored([1], [-1]),
        stored([1], [2**32]),
        stored([1], ["a"]),
        stored([1], [1], block_size=-1),
        stored([1], [1], extra_keys=[3]),
        stored([1], [1], group_idx="0"),
        ["BlockStored", [1]],
        [],
        [7],
        None,
    ],
)
def test_an_event_that_cannot_be_used_is_counted_and_spares_the_others(event: Any) -> None:
    batch = decode_batch(encode([event, removed([5])]))
    assert batch.malformed == 1
    assert batch.events == [BlockRemoved([5], "GPU")]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (ARRAYS[:-1], "msgpack"),
        (ARRAYS + b"\x00", "msgpack"),
        (msgspec.msgpack.encode({"a": 1}), "batch"),
        (msgspec.msgpack.encode([1.0]), "batch"),
        (msgspec.msgpack.encode([1.0, None]), "batch"),
        (msgspec.msgpack.encode(["x", []]), "timestamp"),
        (b"\x91" * 100_000, "msgpack"),
    ],
)
def test_a_payload_that_is_no_batch(payload: bytes, reason: str) -> None:
    with pytest.raises(MalformedBatch) as caught:
        decode_batch(payload)
    assert caught.value.reason == reason


@given(st.binary(max_size=400))
def test_any_bytes_decode_or_are_malformed(payload: bytes) -> None:
    with contextlib.suppress(MalformedBatch):
        decode_batch(payload)


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    # Long enough to spell nothing by chance, short enough to collide with field names.
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "GPU", ""]),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(
            st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "medium", "x"])
            | st.integers(0, 3)
            | st.binary(max_size=2),
            inner,
        )
    ),
    max_leaves=20,
)


@given(st.lists(JSON_LIKE, max_size=4))
def test_any_msgpack_decodes_or_is_malformed(raw: list[Any]) -> None:
    with contextlib.suppress(MalformedBatch):
        decode_batch(msgspec.msgpack.encode(raw))
    decode_batch(msgspec.msgpack.encode([1.0, raw]))


HASHES = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=32)


def unsigned(value: Any) -> Any:
    return value % 2**64 if isinstance(value, int) else value


@given(
    hashes=st.lists(HASHES, max_size=5),
    parent=st.none() | HASHES,
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    medium=st.none() | st.text(max_size=8),
    salt=st.none() | st.text(max_size=8),
)
def test_both_encodings_round_trip(
    hashes: list[Any], parent: Any, tokens: list[int], medium: str | None, salt: str | None
) -> None:
    keys = None if salt is None else [[salt]]
    event = stored(hashes, tokens, parent=parent, medium=medium, extra_keys=keys)
    gone = removed(hashes, medium=medium)
    maps = decode_batch(encode([event, gone]))
    assert maps == decode_batch(encode([as_array(event), as_array(gone)]))
    assert maps.malformed == 0
    hashes = [unsigned(each) for each in hashes]
    parent = unsigned(parent)
    assert maps.events == [
        BlockStored(hashes, parent, pack_tokens(tokens), 16, medium, extra_keys=keys),
        BlockRemoved(hashes, medium),
    ]


@given(st.binary(max_size=12))
def test_a_sequence_is_eight_bytes(frame: bytes) -> None:
    if len(frame) == 8:
        assert decode_seq(frame) == int.from_bytes(frame, "big", signed=True)
    else:
        with pytest.raises(MalformedBatch):
            decode_seq(frame)


@pytest.mark.parametrize("name", NAMES)
def test_recordings_hold_nothing_unknown(name: str) -> None:
    seen = 0
    for frames in messages(name):
        decode_seq(frames[-2])
        if frames[-1]:
            batch = decode_batch(frames[-1])
            seen += len(batch.events)
            assert (batch.malformed, batch.unknown_tags, batch.unknown_fields) == (0, 0, 0)
    assert seen


def test_recordings_are_there() -> None:
    assert len(NAMES) == 7
