import msgspec
import pytest

from loadgen.replica.events import BlockRemoved, BlocksCleared, BlocksStored
from loadgen.replica.hashing import hash_digest
from loadgen.replica.wire import BatchEncoder, EventEncoding, HashForm

# One batch as other implementations of the format write it: stored, removed, cleared.
SAMPLE_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f726564920b0cc0940102030402c0a347505593ac426c6f63"
    "6b52656d6f766564910ba347505591b0416c6c426c6f636b73436c656172656400"
)
SAMPLE_MAP = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0c"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a65"
    "02a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c083a474797065ac426c6f636b52"
    "656d6f766564ac626c6f636b5f686173686573910ba66d656469756da347505581a474797065b0416c6c426c6f"
    "636b73436c656172656400"
)
EVENTS = [
    BlocksStored([11, 12], None, [1, 2, 3, 4], 2, "", ""),
    BlockRemoved(11),
    BlocksCleared(),
]


class MapEvent(msgspec.Struct, tag_field="type"):
    pass


class BlockStored(MapEvent, tag="BlockStored", kw_only=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    session_id: str | None = None


class BlockRemovedMap(MapEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class ClearedMap(MapEvent, tag="AllBlocksCleared"):
    pass


MapBatch = tuple[float, list[BlockStored | BlockRemovedMap | ClearedMap], int | None]


class ArrayEvent(msgspec.Struct, array_like=True):
    pass


class BlockStoredArray(ArrayEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemovedArray(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class ClearedArray(ArrayEvent, tag="AllBlocksCleared"):
    pass


ArrayBatch = tuple[float, list[BlockStoredArray | BlockRemovedArray | ClearedArray], int | None]


def encoded(encoding: EventEncoding, hash_form: HashForm = HashForm.INT) -> bytes:
    return BatchEncoder(encoding, hash_form, 0).encode(EVENTS, 1.5)


@pytest.mark.parametrize(
    ("encoding", "sample", "kind"),
    [
        (EventEncoding.MAP, SAMPLE_MAP, MapBatch),
        (EventEncoding.ARRAY, SAMPLE_ARRAY, ArrayBatch),
    ],
)
def test_a_reader_of_the_format_sees_the_same_batch(
    encoding: EventEncoding, sample: bytes, kind: type
) -> None:
    ours = msgspec.msgpack.decode(encoded(encoding), type=kind)
    theirs = msgspec.msgpack.decode(sample, type=kind)
    stored = ours[1][0]
    if encoding is EventEncoding.MAP:
        assert stored.extra_keys == [None, None]
        stored.extra_keys = None
    assert ours == theirs


def test_array_fields_are_those_of_the_last_release_that_had_them() -> None:
    _, events, rank = msgspec.msgpack.decode(encoded(EventEncoding.ARRAY))
    assert rank == 0
    assert events[0] == [
        "BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0,
        "full_attention", None,
    ]  # fmt: skip
    assert events[1] == ["BlockRemoved", [11], "GPU", 0]
    assert events[2] == ["AllBlocksCleared"]


def test_byte_hashes_end_in_the_integer_form() -> None:
    _, events, _ = msgspec.msgpack.decode(encoded(EventEncoding.MAP, HashForm.BYTES))
    wire = events[0]["block_hashes"][1]
    assert wire == hash_digest(12)
    assert len(wire) == 32
    assert int.from_bytes(wire, "big") & (2**64 - 1) == 12


def test_salt_and_adapter_show_as_extra_keys() -> None:
    encoder = BatchEncoder(EventEncoding.MAP, HashForm.INT, 3)
    events = [
        BlocksStored([1, 2], None, [5, 6], 1, "tenant", "lora", "session"),
        BlocksStored([3], 2, [7], 1, "tenant", "lora"),
        BlocksStored([4, 5], None, [8, 9], 1, "tenant", ""),
    ]
    _, (first, later, plain), rank = msgspec.msgpack.decode(
        encoder.encode(events, 0.0), type=MapBatch
    )
    assert rank == 3
    assert first.extra_keys == [["lora", "tenant"], ["lora"]]
    assert later.extra_keys == [["lora"]]
    assert plain.extra_keys == [["tenant"], None]
    assert (first.lora_name, plain.lora_name) == ("lora", None)
    assert first.lora_id is not None
    assert (first.session_id, later.session_id) == ("session", None)
