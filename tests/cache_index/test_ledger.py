"""Engine blocks to own units: roots, counts, tiers, groups."""

from __future__ import annotations

from typing import Any

import pytest

from cache_index import Root, chain_packed, pack_tokens
from cache_index.events import decode_batch
from cache_index.groups import part_of
from cache_index.ledger import Ledger, NewEpoch, Operation, Remove, Store

from .publisher import CLEARED, MODEL, encode, removed, stored

TOKENS = list(range(64))


def feed(ledger: Ledger, *events: dict[str, Any]) -> list[Operation]:
    out: list[Operation] = []
    ledger.apply(decode_batch(encode(events)).events, out)
    return out


def units(operations: list[Operation], tier: str = "device") -> bytes:
    """All units stored in a tier, in order."""
    return b"".join(
        block.units
        for op in operations
        if isinstance(op, Store) and op.tier == tier
        for block in op.blocks
    )


def chain(tokens: list[int], **root: str) -> bytes:
    return chain_packed(Root(MODEL, **root).digest(), pack_tokens(tokens), 16)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MODEL, 16)


def test_a_child_continues_its_parents_chain(ledger: Ledger) -> None:
    out = feed(ledger, stored([1, 2], TOKENS[:32]), stored([b"x"], TOKENS[32:48], parent=2))
    assert units(out) == chain(TOKENS[:48])


@pytest.mark.parametrize("block_size", [16, 32, 64, 1568])
def test_an_engine_block_is_a_whole_number_of_units(ledger: Ledger, block_size: int) -> None:
    tokens = list(range(2 * block_size))
    out = feed(ledger, stored([1, 2], tokens, block_size=block_size))
    assert units(out) == chain(tokens)
    assert ledger.unit == block_size // 16
    (remove,) = feed(ledger, removed([2]))
    assert isinstance(remove, Remove)
    assert remove.block.units == chain(tokens)[block_size // 2 :]


def test_a_block_size_that_does_not_fit_makes_the_source_unusable(ledger: Ledger) -> None:
    assert feed(ledger, stored([1], range(24), block_size=24)) == []
    assert "24" in ledger.unusable


@pytest.mark.parametrize(
    ("fields", "root"),
    [
        ({"extra_keys": [["tenant"], None]}, {"salt": "tenant"}),
        ({"cache_salt": "tenant"}, {"salt": "tenant"}),
        ({"lora_id": 3, "lora_name": "fr"}, {"adapter": "fr"}),
        (
            {"lora_id": 3, "lora_name": "fr", "extra_keys": [["fr", "tenant"], ["fr"]]},
            {"adapter": "fr", "salt": "tenant"},
        ),
    ],
)
def test_the_root_is_read_from_the_event(
    ledger: Ledger, fields: dict[str, Any], root: dict[str, str]
) -> None:
    assert units(feed(ledger, stored([1, 2], TOKENS[:32]) | fields)) == chain(TOKENS[:32], **root)


@pytest.mark.parametrize(
    ("fields", "credited"),
    [
        ({"extra_keys": [[["image", 3]], None]}, 0),
        ({"extra_keys": [["image", "tenant"], None]}, 0),
        ({"extra_keys": [[b"embeds"], None]}, 0),
        ({"extra_keys": [None, ["image"]]}, 1),
        ({"lora_id": 3, "lora_name": None}, 0),
    ],
)
def test_what_is_more_than_tokens_gets_no_credit_and_nor_do_its_children(
    ledger: Ledger, fields: dict[str, Any], credited: int
) -> None:
    out = feed(ledger, stored([1, 2], TOKENS[:32]) | fields, stored([3], TOKENS[32:48], parent=2))
    assert units(out) == chain(TOKENS[:32])[: credited * 8]
    assert not ledger.orphaned
    assert feed(ledger, removed([3, 2])) == []


def test_a_hash_stored_twice_is_held_until_it_is_removed_twice(ledger: Ledger) -> None:
    twice = stored([1], TOKENS[:16])
    assert [type(op) for op in feed(ledger, twice, twice)] == [Store]
    assert feed(ledger, removed([1])) == []
    assert [type(op) for op in feed(ledger, removed([1]))] == [Remove]
    assert len(ledger) == 0
    assert feed(ledger, removed([1])) == []


def test_an_unknown_parent_is_dropped_and_told(ledger: Ledger) -> None:
    assert feed(ledger, stored([2], TOKENS[:16], parent=1)) == []
    assert ledger.orphaned
    assert ledger.counts["orphaned"] == 1


def test_a_short_last_block_is_known_but_not_credited(ledger: Ledger) -> None:
    out = feed(ledger, stored([1, 2], TOKENS[:25]))
    assert units(out) == chain(TOKENS[:16])
    assert feed(ledger, removed([2])) == []


def test_more_tokens_than_blocks_is_no_credit(ledger: Ledger) -> None:
    assert feed(ledger, stored([1], TOKENS)) == []


FULL = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
WINDOW = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 20,
    "group_idx": 1,
}
STATE = {"kv_cache_spec_kind": "mamba", "group_idx": 2}


def told(ledger: Ledger, operations: list[Operation]) -> dict[str, bytes]:
    """What an index that follows the operations has, by class: "f", "w", "s", or a tier."""
    held: dict[str, bytes] = {}
    for op in operations:
        if isinstance(op, NewEpoch):
            held = {}
        elif isinstance(op, Store):
            tier, number, shape = part_of(op.tier)
            name = tier if shape is None else shape.classes[number].rule
            held[name] = held.get(name, b"") + b"".join(block.units for block in op.blocks)
    return held


def test_each_class_of_groups_is_told_by_itself(ledger: Ledger) -> None:
    out = feed(
        ledger,
        stored([1, 2, 3, 4], TOKENS, **FULL),
        stored([3, 4], TOKENS, **WINDOW),
        stored([4], TOKENS, **STATE),
    )
    units_ = chain(TOKENS)
    assert told(ledger, out) == {"f": units_, "w": units_[16:], "s": units_[24:]}
    assert not ledger.orphaned
    (gone,) = feed(ledger, removed([4], group_idx=2))
    assert isinstance(gone, Remove)
    assert ledger.unit_of(gone.tier) == (1, True)


def test_groups_may_come_in_any_order(ledger: Ledger) -> None:
    out = feed(
        ledger,
        stored([4], TOKENS, kv_cache_spec_kind="mamba", group_idx=0),
        stored([1, 2, 3, 4], TOKENS, kv_cache_spec_kind="full_attention", group_idx=1),
    )
    assert told(ledger, out) == {"f": chain(TOKENS), "s": chain(TOKENS)[24:]}
    assert ledger.unusable == ""


def test_a_group_that_was_not_known_tells_all_anew(ledger: Ledger) -> None:
    before = feed(ledger, stored([1, 2], TOKENS[:32], **FULL))
    assert told(ledger, before) == {"device": chain(TOKENS[:32])}
    after = feed(ledger, stored([2], TOKENS[:32], **WINDOW))
    assert isinstance(after[-3], NewEpoch)
    assert told(ledger, after) == {"f": chain(TOKENS[:32]), "w": chain(TOKENS[:32])[8:]}


def test_groups_of_one_class_hold_what_all_of_them_hold(ledger: Ledger) -> None:
    other = FULL | {"group_idx": 1}
    feed(ledger, stored([1, 2], TOKENS[:32], **FULL), stored([1, 2], TOKENS[:32], **other))
    assert b"".join(b.units for op in ledger.held() for b in op.blocks) == chain(TOKENS[:32])
    assert len(feed(ledger, removed([2], group_idx=1))) == 1
    assert feed(ledger, removed([2], group_idx=0)) == []
    assert feed(ledger, stored([2], TOKENS[16:32], parent=1, **FULL)) == []
    assert len(feed(ledger, stored([2], TOKENS[16:32], parent=1, **other))) == 1


def test_a_removal_in_the_batch_of_its_store_is_not_overtaken(ledger: Ledger) -> None:
    feed(ledger, stored([1, 2], TOKENS[:32], **FULL), stored([2], TOKENS[:32], **STATE))
    feed(
        ledger,
        stored([3], TOKENS[32:48], parent=2, **FULL),
        stored([3], TOKENS[32:48], parent=2, **STATE),
        removed([3], group_idx=2),
    )
    assert told(ledger, list(ledger.held()))["s"] == chain(TOKENS[:32])[8:]


def test_a_block_whose_place_is_not_said_is_left_out(ledger: Ledger) -> None:
    out = feed(ledger, stored([1, 2], TOKENS[:32], **FULL), stored([9], TOKENS[:32], **STATE))
    assert told(ledger, out) == {"f": chain(TOKENS[:32])}
    assert ledger.counts["unplaced"] == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_cache_spec_kind": "cross_attention", "group_idx": 1}, "cross_attention"),
        ({"kv_cache_spec_kind": "unknown", "group_idx": 1}, "unknown"),
        ({"group_idx": 1}, "none"),
        ({"kv_cache_spec_kind": "sliding_window", "group_idx": 1, "block_size": 8}, "8 tokens"),
        ({"lookahead_token_ids": [[7]], **FULL}, "following block"),
    ],
)
def test_what_is_not_understood_makes_the_source_unusable_and_says_why(
    ledger: Ledger, fields: dict[str, Any], why: str
) -> None:
    feed(ledger, stored([1], TOKENS[:16], **FULL))
    feed(ledger, stored([1], TOKENS[:16]) | fields)
    assert why in ledger.unusable
    ledger.forget_shape()
    assert ledger.unusable == ""


def test_without_full_attention_there_is_no_credit(ledger: Ledger) -> None:
    feed(ledger, stored([1], TOKENS[:16], **WINDOW))
    assert "full-attention" in ledger.unusable


def test_an_entry_inside_a_block_is_not_a_block(ledger: Ledger) -> None:
    wide = {"block_size": 32, **FULL}
    feed(ledger, stored([1], TOKENS[:32], **wide))
    assert feed(ledger, stored([5], TOKENS[32:48], parent=1, **FULL)) == []
    assert not ledger.orphaned
    assert ledger.counts["partial_entry"] == 1


def test_an_entry_inside_a_block_that_came_first_is_forgotten(ledger: Ledger) -> None:
    feed(ledger, stored([5], TOKENS[:16], **FULL))
    out = feed(ledger, stored([1], TOKENS[:32], block_size=32, **FULL))
    assert told(ledger, out) == {"device": chain(TOKENS[:32])}
    assert ledger.unit == 2


def test_blocks_that_part_in_their_middle_keep_what_they_share(ledger: Ledger) -> None:
    other = TOKENS[:32] + list(range(900, 932))
    feed(ledger, stored([1], TOKENS, block_size=64), stored([2], other, block_size=64))
    (gone,) = feed(ledger, removed([1]))
    assert isinstance(gone, Remove)
    assert gone.keep == 2
    (gone,) = feed(ledger, removed([2]))
    assert isinstance(gone, Remove)
    assert gone.keep == 0


REPORT = stored([1, 2], TOKENS[:32], **FULL)
NEXT = stored([3], TOKENS[32:48], parent=2, **FULL)


def test_blocks_announced_again_are_not_copies(ledger: Ledger) -> None:
    feed(ledger, REPORT)
    assert feed(ledger, REPORT, NEXT)
    feed(ledger, REPORT)
    feed(ledger, REPORT, stored([4], TOKENS[:16], parent=2, **FULL))
    assert len(feed(ledger, removed([2], group_idx=0))) == 1
    assert len(feed(ledger, removed([1], group_idx=0))) == 1
    assert ledger.counts["reports_reuse"] == 1


def test_copies_are_counted_where_reuse_is_not_reported(ledger: Ledger) -> None:
    feed(ledger, REPORT)
    feed(ledger, REPORT)
    feed(ledger, NEXT)
    feed(ledger, stored([2], TOKENS[16:32], parent=1, **FULL))
    assert feed(ledger, removed([2], group_idx=0), removed([2], group_idx=0)) == []
    assert len(feed(ledger, removed([2], group_idx=0))) == 1


def test_a_report_counted_as_a_copy_is_undone_once_reports_are_known(ledger: Ledger) -> None:
    feed(ledger, REPORT, NEXT)
    feed(ledger, REPORT)
    # It may have been a copy, so this may not have been the last.
    assert feed(ledger, removed([2], group_idx=0)) == []
    other = stored([9], TOKENS[32:48], parent=1, **FULL)
    out = feed(ledger, stored([1], TOKENS[:16], **FULL), other)
    gone = [op for op in out if isinstance(op, Remove)]
    assert [op.block.units for op in gone] == [chain(TOKENS[:32])[8:]]
    # What had no removal stays, once.
    assert len(feed(ledger, removed([1, 9], group_idx=0))) == 2


def test_a_block_stored_anew_after_a_counted_report_is_held(ledger: Ledger) -> None:
    feed(ledger, REPORT)
    feed(ledger, REPORT)
    feed(ledger, removed([2], group_idx=0))
    out = feed(
        ledger,
        stored([1], TOKENS[:16], **FULL),
        stored([2], TOKENS[16:32], parent=1, **FULL),
    )
    assert [type(op) for op in out] == [Remove, Store]
    assert len(feed(ledger, removed([2], group_idx=0))) == 1


def test_a_group_that_was_named_and_not_heard_makes_the_source_unusable(ledger: Ledger) -> None:
    why = "not all of its cache groups have been heard"
    feed(ledger, stored([1], TOKENS[:16], **FULL))
    assert ledger.unusable == ""
    feed(ledger, removed([7], group_idx=1))
    assert ledger.unusable == why
    feed(ledger, CLEARED)
    assert ledger.unusable == why
    feed(ledger, stored([1], TOKENS[:16], **FULL), stored([1], TOKENS[:16], **WINDOW))
    assert ledger.unusable == ""


def test_a_full_group_with_a_later_number_is_not_alone(ledger: Ledger) -> None:
    feed(ledger, stored([1], TOKENS[:16], **{**FULL, "group_idx": 1}))
    assert ledger.unusable == "not all of its cache groups have been heard"


def test_removals_of_a_plain_model_or_of_a_pool_name_no_other_group(ledger: Ledger) -> None:
    feed(ledger, removed([7], group_idx=0), removed([7]), removed([7], group_idx=1, medium="CPU"))
    feed(ledger, stored([1], TOKENS[:16], **FULL))
    assert ledger.unusable == ""


def test_an_event_may_say_itself_that_it_is_a_report(ledger: Ledger) -> None:
    feed(ledger, REPORT)
    feed(ledger, REPORT | {"origin": "REUSED"})
    assert len(feed(ledger, removed([1, 2], group_idx=0))) == 2


def test_a_report_about_windows_and_states_names_blocks_that_are_not_there(
    ledger: Ledger,
) -> None:
    tail = [stored([2], TOKENS[:32], **WINDOW), stored([2], TOKENS[:32], **STATE)]
    report = [REPORT, stored([1, 2], TOKENS[:32], **WINDOW), stored([1, 2], TOKENS[:32], **STATE)]
    feed(ledger, REPORT, *tail)
    out = feed(ledger, *report, NEXT)
    assert NewEpoch("announces reused blocks") in out
    assert ledger.orphaned
    feed(ledger, REPORT, *tail)
    feed(ledger, *report)
    assert told(ledger, list(ledger.held()))["w"] == chain(TOKENS[:32])[8:]
    assert told(ledger, list(ledger.held()))["s"] == chain(TOKENS[:32])[8:]


def test_a_hybrid_models_pools_give_no_credit(ledger: Ledger) -> None:
    feed(ledger, stored([1], TOKENS[:16], **FULL), stored([1], TOKENS[:16], **STATE))
    assert feed(ledger, stored([1], [], block_size=0, medium="CPU", group_idx=0)) == []


@pytest.mark.parametrize("medium", ["CPU", "cpu", "CPU_PINNED"])
def test_a_pool_placeholder_finds_its_block(ledger: Ledger, medium: str) -> None:
    feed(ledger, stored([1, 2], TOKENS[:32]))
    out = feed(ledger, stored([1, 2], [], block_size=0, medium=medium))
    assert units(out, "host") == chain(TOKENS[:32])
    feed(ledger, removed([1, 2]))
    assert len(ledger) == 2
    out = feed(ledger, removed([1], medium=medium), removed([1], medium=medium))
    assert [(type(op), op.tier) for op in out] == [(Remove, "host")]


def test_a_pool_is_a_set(ledger: Ledger) -> None:
    feed(ledger, stored([1], TOKENS[:16]))
    pooled = stored([1], TOKENS[:16], medium="STORAGE")
    assert units(feed(ledger, pooled, pooled), "storage") == chain(TOKENS[:16])
    assert len(feed(ledger, removed([1], medium="STORAGE"))) == 1


def test_a_pool_block_the_device_never_had_gets_no_credit(ledger: Ledger) -> None:
    """LMCache announces the unsalted hashes of salted blocks."""
    feed(ledger, stored([11], TOKENS[:16], extra_keys=[["tenant"]]))
    assert feed(ledger, stored([1], TOKENS[:16], medium="CPU")) == []


def test_announcements_without_keys_count_for_nothing_once_salts_are_in_use(
    ledger: Ledger,
) -> None:
    feed(
        ledger,
        stored([1], TOKENS[:16], extra_keys=[None]),
        stored([11], TOKENS[:16], extra_keys=[["tenant"]]),
    )
    assert feed(ledger, stored([1], TOKENS[:16], medium="CPU")) == []
    with_group = stored([11], TOKENS[:16], medium="cpu", group_idx=0)
    assert units(feed(ledger, with_group), "host") == chain(TOKENS[:16], salt="tenant")


def test_an_engine_cannot_make_up_any_number_of_tiers(ledger: Ledger) -> None:
    feed(ledger, stored([1], TOKENS[:16]))
    tiers = {
        op.tier
        for i in range(50)
        for op in feed(ledger, stored([1], [], block_size=0, medium=f"shelf{i}"))
    }
    assert len(tiers) == 5


def test_held_tells_everything_again(ledger: Ledger) -> None:
    feed(
        ledger,
        stored([1, 2], TOKENS[:32]),
        stored([3], TOKENS[32:48], parent=2),
        stored([1], [], block_size=0, medium="CPU"),
        removed([2]),
    )
    again = list(ledger.held())
    assert units(again) == chain(TOKENS[:48])[:8] + chain(TOKENS[:48])[16:]
    assert units(again, "host") == chain(TOKENS[:16])
