"""Every generation of the wire, as bytes: what each engine sends, and what it means.

The bytes were written with msgspec from the field orders of the engines' sources; real recordings
are replayed elsewhere. A hash of SGLang that is negative on the wire is the same 64 bits unsigned.
"""

from __future__ import annotations

import pytest

from cache_index import pack_tokens
from cache_index.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode_batch
from cache_index.ledger import Ledger, Operation, Store

from .publisher import MODEL, encode, stored

GENERATIONS: dict[str, tuple[str, list[Event]]] = {
    "vLLM 0.9": (
        "93cb3ff80000000000009396ab426c6f636b53746f726564920b0c0a940102030402c092ac426c6f636b"
        "52656d6f766564910b91b0416c6c426c6f636b73436c656172656400",
        [
            BlockStored([11, 12], 10, pack_tokens([1, 2, 3, 4]), 2),
            BlockRemoved([11]),
            AllBlocksCleared(),
        ],
    ),
    "vLLM 0.11": (
        "93cb3ff80000000000009297ab426c6f636b53746f726564920b0c0a940102030402c0a347505593ac42"
        "6c6f636b52656d6f766564910ba347505500",
        [BlockStored([11, 12], 10, pack_tokens([1, 2, 3, 4]), 2, "GPU"), BlockRemoved([11], "GPU")],
    ),
    "vLLM 0.14": (
        "93cb3ff80000000000009298ab426c6f636b53746f726564920b0c0a94010203040207a3475055a66c6f"
        "72612d6193ac426c6f636b52656d6f766564910ba347505500",
        [
            BlockStored([11, 12], 10, pack_tokens([1, 2, 3, 4]), 2, "GPU", 7, "lora-a"),
            BlockRemoved([11], "GPU"),
        ],
    ),
    "vLLM 0.19": (
        "93cb3ff80000000000009299ab426c6f636b53746f726564920b0c0a940102030402c0a3475055c09291"
        "a473616c74c093ac426c6f636b52656d6f766564910ba347505500",
        [
            BlockStored(
                [11, 12], 10, pack_tokens([1, 2, 3, 4]), 2, "GPU", extra_keys=[["salt"], None]
            ),
            BlockRemoved([11], "GPU"),
        ],
    ),
    "vLLM 0.22": (
        "93cb3ff8000000000000929cab426c6f636b53746f726564920b0c0a940102030402c0a3475055c09291"
        "a473616c74c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f766564910ba34750"
        "550000",
        [
            BlockStored(
                [11, 12],
                10,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
            ),
            BlockRemoved([11], "GPU", 0),
        ],
    ),
    "vLLM 0.24": (
        "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "920b0cb1706172656e745f626c6f636b5f686173680aa9746f6b656e5f6964739401020304aa626c6f63"
        "6b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874"
        "72615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f737065635f6b"
        "696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f63"
        "6b5f686173686573910ba66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c"
        "426c6f636b73436c656172656400",
        [
            BlockStored(
                [11, 12],
                10,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
            ),
            BlockRemoved([11], "GPU", 0),
            AllBlocksCleared(),
        ],
    ),
    "vLLM 0.29": (
        "93cb3ff8000000000000928da474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "920b0cb1706172656e745f626c6f636b5f686173680aa9746f6b656e5f6964739401020304aa626c6f63"
        "6b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874"
        "72615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f737065635f6b"
        "696e64ae66756c6c5f617474656e74696f6ea86c6f63616c697479a54c4f43414ca96f776e6572736869"
        "70a6746965722d6186a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910b"
        "a66d656469756da3475055a967726f75705f69647800a86c6f63616c697479a652454d4f5445a96f776e"
        "657273686970a6746965722d6100",
        [
            BlockStored(
                [11, 12],
                10,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
            ),
            BlockRemoved([11], "GPU", 0),
        ],
    ),
    "vLLM 0.31": (
        "93cb3ff8000000000000928ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "920b0cb1706172656e745f626c6f636b5f686173680aa9746f6b656e5f6964739401020304aa626c6f63"
        "6b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874"
        "72615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f737065635f6b"
        "696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a3732d3184a474797065ac426c"
        "6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da3475055a967726f7570"
        "5f6964780000",
        [
            BlockStored(
                [11, 12],
                10,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
            ),
            BlockRemoved([11], "GPU", 0),
        ],
    ),
    "vLLM 0.33": (
        "93cb3ff8000000000000928da474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "920b0cb1706172656e745f626c6f636b5f686173680aa9746f6b656e5f6964739401020304aa626c6f63"
        "6b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874"
        "72615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f737065635f6b"
        "696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a3732d31b36c6f6f6b61686561"
        "645f746f6b656e5f696473910584a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173"
        "686573910ba66d656469756da3475055a967726f75705f6964780000",
        [
            BlockStored(
                [11, 12],
                10,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
                lookahead=True,
            ),
            BlockRemoved([11], "GPU", 0),
        ],
    ),
    "vLLM, whole digests": (
        "93cb3ff8000000000000928ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "92c4200b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0bc4200c0c0c0c0c"
        "0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0cb1706172656e745f626c6f636b5f68"
        "617368c4200a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0aa9746f6b65"
        "6e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055"
        "a96c6f72615f6e616d65c0aa65787472615f6b6579739291a473616c74c0a967726f75705f69647800b2"
        "6b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c"
        "6f636b52656d6f766564ac626c6f636b5f68617368657391c4200b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b"
        "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0ba66d656469756da3475055a967726f75705f6964780000",
        [
            BlockStored(
                [b"\x0b" * 32, b"\x0c" * 32],
                b"\x0a" * 32,
                pack_tokens([1, 2, 3, 4]),
                2,
                "GPU",
                extra_keys=[["salt"], None],
                group=0,
                kind="full_attention",
            ),
            BlockRemoved([b"\x0b" * 32], "GPU", 0),
        ],
    ),
    "SGLang, first arrays": (
        "93cb3ff80000000000009396ab426c6f636b53746f72656491fec092010202c092ac426c6f636b52656d"
        "6f76656491fe91b0416c6c426c6f636b73436c656172656400",
        [
            BlockStored([2**64 - 2], None, pack_tokens([1, 2]), 2),
            BlockRemoved([2**64 - 2]),
            AllBlocksCleared(),
        ],
    ),
    "SGLang, arrays with a medium": (
        "93cb3ff80000000000009297ab426c6f636b53746f72656491fefd92010202c0a347505593ac426c6f63"
        "6b52656d6f76656491feaa4350555f50494e4e454400",
        [
            BlockStored([2**64 - 2], 2**64 - 3, pack_tokens([1, 2]), 2, "GPU"),
            BlockRemoved([2**64 - 2], "CPU_PINNED"),
        ],
    ),
    "SGLang, arrays that end in a map": (
        "93cb3ff80000000000009298ab426c6f636b53746f72656491fec092010202c0a347505582aa63616368"
        "655f73616c74a174aa73657373696f6e5f6964a17393ac426c6f636b52656d6f76656491fea347505500",
        [
            BlockStored([2**64 - 2], None, pack_tokens([1, 2]), 2, "GPU", cache_salt="t"),
            BlockRemoved([2**64 - 2], "GPU"),
        ],
    ),
    "SGLang with EAGLE": (
        "93cb3ff80000000000009197ab426c6f636b53746f72656491fec09292010292020302c0a347505500",
        [BlockStored([2**64 - 2], None, pack_tokens([1, 2]), 2, "GPU")],
    ),
    "SGLang, components of a hybrid model": (
        "93cb3ff80000000000009398ab426c6f636b53746f72656491fec092010202c0a3475055a373776199ab"
        "426c6f636b53746f72656491fec092010202c0a3475055a466756c6c81aa63616368655f73616c74a174"
        "94ac426c6f636b52656d6f76656491fea3475055a373776100",
        [
            BlockStored(
                [2**64 - 2], None, pack_tokens([1, 2]), 2, "GPU", group=1, kind="sliding_window"
            ),
            BlockStored(
                [2**64 - 2],
                None,
                pack_tokens([1, 2]),
                2,
                "GPU",
                group=0,
                kind="full_attention",
                cache_salt="t",
            ),
            BlockRemoved([2**64 - 2], "GPU", 1),
        ],
    ),
    "SGLang, maps": (
        "93cb3ff8000000000000928aa474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "91feb1706172656e745f626c6f636b5f68617368fda9746f6b656e5f696473920102aa626c6f636b5f73"
        "697a6502a76c6f72615f6964c0a66d656469756da845585445524e414caa63616368655f73616c74a174"
        "aa73657373696f6e5f6964a173a96c6f72615f6e616d65a16c83a474797065ac426c6f636b52656d6f76"
        "6564ac626c6f636b5f68617368657391fea66d656469756da44449534b00",
        [
            BlockStored(
                [2**64 - 2],
                2**64 - 3,
                pack_tokens([1, 2]),
                2,
                "EXTERNAL",
                lora_name="l",
                cache_salt="t",
            ),
            BlockRemoved([2**64 - 2], "DISK"),
        ],
    ),
    "LMCache server": (
        "93cb3ff80000000000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "910bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73"
        "697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c083a474797065ac"
        "426c6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da343505500",
        [BlockStored([11], None, pack_tokens([1, 2]), 2, "CPU"), BlockRemoved([11], "CPU")],
    ),
    "LMCache in the engine": (
        "93cb3ff80000000000009197ab426c6f636b53746f72656491fefd90cd0100c0a363707500",
        [BlockStored([2**64 - 2], 2**64 - 3, b"", 256, "cpu")],
    ),
    "Mooncake store": (
        "93cb3ff80000000000009189a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "910bb1706172656e745f626c6f636b5f686173680aa9746f6b656e5f69647390aa626c6f636b5f73697a"
        "6502a76c6f72615f6964c0a66d656469756da3637075a96c6f72615f6e616d65c0a967726f75705f6964"
        "780000",
        [BlockStored([11], 10, b"", 2, "cpu", group=0)],
    ),
    "vLLM offloading, placeholder": (
        "93cb3ff8000000000000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "910bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a"
        "6500a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f6964"
        "7800a86c6f63616c697479a54c4f43414c00",
        [BlockStored([11], None, b"", 0, "CPU", group=0)],
    ),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_generation_is_understood_and_nothing_in_it_is_unknown(name: str) -> None:
    payload, events = GENERATIONS[name]
    batch = decode_batch(bytes.fromhex(payload))
    assert batch.events == events
    assert (batch.timestamp_s, batch.rank) == (1.5, 0)
    assert (batch.malformed, batch.unknown_tags, batch.unknown_fields) == (0, 0, 0)


def test_what_a_newer_map_of_sglang_adds_is_counted_and_passed_over() -> None:
    array = ["BlockStored", [-2], None, [1, 2], 2, None, "GPU", {"cache_salt": "t", "new": 1}, 5]
    inner = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "metadata": {"new": 1}}
    batch = decode_batch(encode([array, inner]))
    assert (batch.malformed, batch.unknown_fields) == (0, 3)
    first, second = batch.events
    assert isinstance(first, BlockStored)
    assert first.cache_salt == "t"
    assert second == BlockRemoved([1], "GPU")


def test_an_unknown_component_is_a_group_of_its_own() -> None:
    array = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", "conv", {"cache_salt": "t"}]
    (event,) = decode_batch(encode([array])).events
    assert isinstance(event, BlockStored)
    assert (event.group, event.kind) == (3, "conv")


def test_an_adapter_called_like_a_component_is_an_adapter() -> None:
    array = ["BlockStored", [1], None, [1, 2], 2, 4, "GPU", "full"]
    (event,) = decode_batch(encode([array])).events
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.group) == ("full", None)


def test_the_same_hash_signed_and_unsigned_is_one_block() -> None:
    ledger = Ledger(MODEL, 16)
    out: list[Operation] = []
    signed = stored([-5], range(16))
    child = stored([-6], range(16, 32), parent=2**64 - 5)
    for event in (signed, child):
        ledger.apply(decode_batch(encode([event])).events, out)
    assert (len(ledger), ledger.orphaned) == (2, False)
    gone = {"type": "BlockRemoved", "block_hashes": [2**64 - 6, -5], "medium": "GPU"}
    ledger.apply(decode_batch(encode([gone])).events, out)
    assert len(ledger) == 0
    assert sum(len(each.blocks) for each in out if isinstance(each, Store)) == 2
