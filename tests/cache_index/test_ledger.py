"""Engine blocks to own units: roots, counts, tiers, groups."""

from __future__ import annotations

from typing import Any

import pytest

from cache_index import Root, chain_packed, pack_tokens
from cache_index.events import decode_batch
from cache_index.ledger import Ledger, Operation, Remove, Store

from .publisher import MODEL, encode, removed, stored

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


def test_only_the_first_full_attention_group_counts(ledger: Ledger) -> None:
    mamba = stored([7], TOKENS[:16], kv_cache_spec_kind="mamba", group_idx=0)
    full = stored([1], TOKENS[:16], kv_cache_spec_kind="full_attention", group_idx=1)
    other = stored([1], TOKENS[:16], kv_cache_spec_kind="full_attention", group_idx=2)
    unnamed = stored([8], TOKENS[:16], group_idx=4)
    assert units(feed(ledger, mamba, full, other, unnamed)) == chain(TOKENS[:16])
    assert feed(ledger, removed([1], group_idx=2), removed([7], group_idx=0)) == []
    assert len(feed(ledger, removed([1], group_idx=1))) == 1


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
