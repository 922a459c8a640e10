"""Hash chains and roots."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache_index import ModelIdentity, Root, chain_hashes, chain_packed, pack_hashes, pack_tokens
from cache_index.blocks import unpack_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_the_chain_is_xxh3_seeded_with_its_parent() -> None:
    """A value of its own, so that an index filled by one version is readable by the next."""
    assert chain_hashes(0, pack_tokens(range(32)), 16) == [
        first := xxhash.xxh3_64_intdigest(struct.pack("<16I", *range(16)), 0),
        xxhash.xxh3_64_intdigest(struct.pack("<16I", *range(16, 32)), first),
    ]


@given(TOKENS, st.integers(0, 2**64 - 1), st.integers(1, 20))
def test_only_full_units_have_a_hash(tokens: list[int], root: int, unit: int) -> None:
    assert len(chain_hashes(root, pack_tokens(tokens), unit)) == len(tokens) // unit


@given(TOKENS, st.integers(0, 2**64 - 1), st.integers(0, 6))
def test_a_chain_goes_on_from_any_of_its_hashes(tokens: list[int], root: int, cut: int) -> None:
    whole = chain_hashes(root, pack_tokens(tokens), 16)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root
    assert whole[cut:] == chain_hashes(parent, pack_tokens(tokens[cut * 16 :]), 16)


@given(TOKENS, TOKENS, st.integers(0, 99))
def test_chains_share_exactly_their_common_beginning(
    one: list[int], other: list[int], cut: int
) -> None:
    other = one[:cut] + other
    first = chain_hashes(5, pack_tokens(one), 4)
    second = chain_hashes(5, pack_tokens(other), 4)
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == (one[: i * 4 + 4] == other[: i * 4 + 4])


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_hashes_unpack(hashes: list[int]) -> None:
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    assert pack_hashes(hashes) == struct.pack(f"<{len(hashes)}Q", *hashes)


def test_packed_and_plain_chains_are_one() -> None:
    tokens = pack_tokens(range(320))
    assert pack_hashes(chain_hashes(3, tokens, 16)) == chain_packed(3, tokens, 16)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_is_32_bits(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


FIELDS = st.tuples(st.text(), st.text(), st.text(), st.text(), st.text())


def root_of(fields: tuple[str, str, str, str, str]) -> Root:
    name, revision, tokenizer, adapter, salt = fields
    return Root(ModelIdentity(name, revision, tokenizer), adapter, salt)


@given(FIELDS, FIELDS)
def test_roots_are_equal_only_if_every_field_is(
    one: tuple[str, str, str, str, str], other: tuple[str, str, str, str, str]
) -> None:
    assert (root_of(one).digest() == root_of(other).digest()) == (one == other)


@pytest.mark.parametrize("place", range(5))
def test_a_value_means_something_else_in_another_field(place: int) -> None:
    fields = ["", "", "", "", ""]
    fields[place] = "x"
    digests = set()
    for at in range(5):
        moved = ["", "", "", "", ""]
        moved[at] = "x"
        digests.add(root_of((moved[0], moved[1], moved[2], moved[3], moved[4])).digest())
    assert len(digests) == 5
    assert 0 <= root_of((fields[0], fields[1], fields[2], fields[3], fields[4])).digest() < 2**64


def test_a_lone_surrogate_has_a_digest() -> None:
    assert Root(ModelIdentity("m"), salt="\ud800").digest() != Root(ModelIdentity("m")).digest()
