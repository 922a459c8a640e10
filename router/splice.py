"""Adds or replaces top-level fields in a JSON body's bytes; every other byte stays as it came.

Only for bodies that have been parsed: what stands between the tokens looked at here is known to
be JSON. Where the gateway enforces a field, a second or escaped spelling of its key is refused,
because gateway and engine could read different ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from router.errors import InvalidRequest

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb"|[{}\[\],:]", re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+[{}\[\]]", re.DOTALL)
"""Inside a value only brackets matter: what stands between them is skipped in C, however long."""
MAX_STEPS = 500_000
"""Brackets, keys and commas that are looked at one by one, while nobody else is served."""
_TOO_MANY = (
    "The request body has too many members for a model's alias to be replaced in it; "
    "name the model itself."
)
_OPENING = b"{["
_CLOSING = b"}]"


class Member(NamedTuple):
    """One top-level member: its key as written, without quotes, and the span of its value."""

    key: bytes
    start: int
    end: int

    @property
    def name(self) -> str:
        """The key as a parser reads it."""
        if b"\\" not in self.key:
            return self.key.decode("utf-8", "surrogatepass")
        return str(json.loads(b'"%b"' % self.key))


def members(body: bytes) -> Iterator[Member]:
    """Top-level members of a JSON object, in order, duplicates included.

    Raises InvalidRequest for a body of more than `MAX_STEPS`.
    """
    depth = at = steps = 0
    key, start = b"", -1
    while token := _TOKEN.search(body, at) if depth <= 1 else _TO_BRACKET.match(body, at):
        first = token.group()[:1] if depth <= 1 else body[token.end() - 1 : token.end()]
        at = token.end()
        steps += 1
        if steps > MAX_STEPS:
            raise InvalidRequest(_TOO_MANY, param="model")
        if first in _OPENING:
            depth += 1
        elif first in _CLOSING:
            depth -= 1
        at_top = depth == 1
        if first == b'"' and at_top and start < 0:
            key = token.group()[1:-1]
        elif first == b":" and at_top and start < 0:
            start = token.end()
        elif start >= 0 and ((first == b"," and at_top) or depth == 0):
            yield Member(key, *_trimmed(body, start, token.start()))
            start = -1


def _trimmed(body: bytes, start: int, end: int) -> tuple[int, int]:
    text = body[start:end]
    return start + len(text) - len(text.lstrip()), end - (len(text) - len(text.rstrip()))


def splice(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """`body` with `fields` (name to JSON bytes) set. Raises InvalidRequest for a doubtful key."""
    found = {name: _only(body, name) for name in fields}
    added = [name for name in fields if found[name] is None]
    present = sorted((each, name) for name, each in found.items() if each is not None)
    parts, at = [], 0
    for member, name in sorted(present, key=lambda pair: pair[0].start):
        parts += [body[at : member.start], fields[name]]
        at = member.end
    parts.append(body[at:])
    return _with_added(b"".join(parts), {name: fields[name] for name in added})


def _only(body: bytes, name: str) -> Member | None:
    same = [member for member in members(body) if member.name == name]
    if len(same) > 1:
        raise InvalidRequest(f"`{name}` is given {len(same)} times; give it once.", param=name)
    if same and same[0].key != name.encode():
        raise InvalidRequest(f"`{name}` is spelled with escapes; spell it plainly.", param=name)
    return same[0] if same else None


def _with_added(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    if not fields:
        return body
    brace = body.index(b"{") + 1
    text = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())
    empty = body[brace:].lstrip().startswith(b"}")
    return body[:brace] + text + (b"" if empty else b",") + body[brace:]
