"""Splicing changes the named fields and not one byte besides."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidRequest
from router.splice import members, splice

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=6), values, max_size=6)
spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])


def dumped(content: object, separators: tuple[str, str], ascii_only: bool, pad: str) -> bytes:
    text = json.dumps(content, separators=separators, ensure_ascii=ascii_only)
    return (pad + text + pad).encode("utf-8", "surrogatepass")


@given(objects, spacing, st.booleans(), st.sampled_from(["", " ", "\n\t"]))
def test_members_are_what_a_parser_finds(content, separators, ascii_only, pad) -> None:
    body = dumped(content, separators, ascii_only, pad)
    found = [(each.name, json.loads(body[each.start : each.end])) for each in members(body)]
    assert found == list(content.items())


@given(objects, spacing, st.sampled_from(["", " "]), values)
def test_a_set_field_is_set_and_all_other_bytes_stay(content, separators, pad, value) -> None:
    content.pop("model", None)
    value_bytes = json.dumps(value).encode()
    body = dumped(content, separators, True, pad)
    added = splice(body, {"model": value_bytes})
    assert json.loads(added) == {"model": value, **content}
    assert added.replace(b'"model":' + value_bytes + (b"," if content else b""), b"", 1) == body

    there = dumped({**content, "model": 1, "z": 2}, separators, True, pad)
    replaced = splice(there, {"model": value_bytes})
    assert json.loads(replaced) == {**content, "model": value, "z": 2}
    (member,) = (each for each in members(there) if each.name == "model")
    assert replaced == there[: member.start] + value_bytes + there[member.end :]


def test_several_fields_at_once() -> None:
    body = b'{"b": 1, "a" : [1, {"b": 2}] ,"c":"}"}'
    assert splice(body, {"a": b"0", "b": b"9", "d": b"8"}) == b'{"d":8,"b": 9, "a" : 0 ,"c":"}"}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model":"a","model":"b"}', "given 2 times"),
        (b'{"model":"a","\\u006dodel":"b"}', "given 2 times"),
        (b'{"\\u006dodel":"a"}', "spelled with escapes"),
    ],
)
def test_a_doubtful_key_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        splice(body, {"model": b'"x"'})
    assert caught.value.param == "model"


def test_a_doubtful_key_that_is_not_enforced_passes() -> None:
    body = b'{"n":1,"n":2,"\\u006d":3}'
    assert splice(body, {"model": b'"x"'}) == b'{"model":"x",' + body[1:]


def test_long_values_are_passed_over_quickly() -> None:
    ids = b",".join(b"%d" % number for number in range(300_000))
    body = b'{"prompt":[' + ids + b'],"model":"a","pad":"' + b"x" * 3_000_000 + b'"}'
    tokens = sum(1 for _ in members(body))
    assert tokens == 3
    assert splice(body, {"model": b'"b"'}) == body.replace(b'"model":"a"', b'"model":"b"')


def test_what_stands_between_brackets_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.splice.MAX_STEPS", 20)
    many = b",".join([b'"a\\"]"', b"1", b'"{"'] * 100_000)
    body = b'{"stop":[[' + many + b'],[]],"model":"a"}'
    assert splice(body, {"model": b'"b"'}) == body.replace(b'"model":"a"', b'"model":"b"')


@pytest.mark.parametrize("filler", [b'"a":1', b'"a":[[],[]]', b'"a":{"b":{}}'])
def test_a_body_that_would_hold_everybody_up_is_refused(
    filler: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.splice.MAX_STEPS", 300)
    small = b"{" + b",".join([filler] * 20) + b',"model":"a"}'
    assert splice(small, {"model": b'"b"'}) == small.replace(b'"model":"a"', b'"model":"b"')
    large = b"{" + b",".join([filler] * 100) + b',"model":"a"}'
    with pytest.raises(InvalidRequest, match="name the model itself"):
        splice(large, {"model": b'"b"'})
