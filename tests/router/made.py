"""Requests made at random: JSON as odd as it may be, framed and coded in every way, or damaged."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable
from typing import NamedTuple

from tests.router.support import MODEL

SPACES = ("", "", "", " ", "\n", "\t", "\r\n  ")
NUMBERS = ("0", "-0", "1.0", "1.00", "1e5", "1E+2", "-1.5e-3", "1e400", "12345678901234567890123")
WORDS = ("true", "false", "null", "NaN", "Infinity", *NUMBERS)
TEXTS = (
    "plain ",
    "\\u0041",
    "\\ud83d\\ude00",
    "\\ud800",
    "\\/",
    "\\n",
    "é",
    "😀",
    "\\u0000",
    '\\"',
    "{[",
)


class Case(NamedTuple):
    """What hypothesis draws, and shrinks; `seed` decides the rest."""

    seed: int
    damage: str
    coding: str
    framing: str
    target: str
    pieces: int


class Made(NamedTuple):
    """A request, and what is right: the replica gets `body`, or the client gets `error`."""

    number: str
    request: bytes
    pieces: int
    body: bytes
    error: tuple[int, str] | None


def text(drawn: random.Random) -> str:
    return '"' + "".join(drawn.choices(TEXTS, k=drawn.randrange(6))) + '"'


def value(drawn: random.Random, depth: int = 0) -> str:
    kind = drawn.randrange(6 if depth < 3 else 3)
    space = drawn.choice(SPACES)
    if kind == 3:
        inside = ",".join(value(drawn, depth + 1) for _ in range(drawn.randrange(4)))
        return f"[{space}{inside}]"
    if kind == 4:
        return joined(
            drawn, [(text(drawn), value(drawn, depth + 1)) for _ in range(drawn.randrange(4))]
        )
    return text(drawn) if kind == 0 else drawn.choice(WORDS)


def joined(drawn: random.Random, members: list[tuple[str, str]]) -> str:
    def spaced(token: str) -> str:
        return drawn.choice(SPACES) + token + drawn.choice(SPACES)

    inside = ",".join(f"{spaced(key)}:{spaced(each)}" for key, each in members)
    return f"{{{inside or drawn.choice(SPACES)}}}"


def members(drawn: random.Random, path: str, damage: str) -> list[tuple[str, str]]:
    model = {"unknown model": '"none"', "model is a number": "1"}.get(damage, f'"{MODEL}"')
    content = [('"model"', model)] if damage != "no model" else []
    if path.endswith("chat/completions"):
        message = joined(drawn, [('"role"', '"user"'), ('"content"', text(drawn))])
        content.append(('"messages"', "{}" if damage == "wrong type" else f"[{message}]"))
    else:
        prompt = drawn.choice((text(drawn), "[1,2,3]", f"[{text(drawn)}]"))
        content.append(('"prompt"', "{}" if damage == "wrong type" else prompt))
    keys = ('"x"', '"\\u0078"', '"dup"', '"temperature"', '"é"')
    content += [(drawn.choice(keys), value(drawn)) for _ in range(drawn.randrange(6))]
    drawn.shuffle(content)
    return content


BREAK: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": lambda drawn, body: body[: drawn.randrange(body.rindex(b"}"))],
    "invalid UTF-8": lambda drawn, body: body.replace(
        b"{", b'{"y":"' + drawn.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x80")) + b'",', 1
    ),
    "more after it": lambda drawn, body: body + drawn.choice((b"}", b"{}", b"x", b"\0")),
    "a bare key": lambda drawn, body: body.replace(b"{", b"{x:1,", 1),
    "a comma too many": lambda drawn, body: body[: body.rindex(b"}")] + b",}",
    "a control character": lambda drawn, body: body.replace(b"{", b'{"y":"\n",', 1),
    "an array": lambda drawn, body: b"[" + body + b"]",
}
DAMAGES = {
    **dict.fromkeys(BREAK, (400, "invalid_request")),
    "no model": (400, "invalid_request"),
    "model is a number": (400, "invalid_request"),
    "wrong type": (400, "invalid_request"),
    "unknown model": (404, "model_not_found"),
}
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
    "identity": bytes,
    "gzip, cut": lambda body: gzip.compress(body, 1)[:-3],
    "lzma": bytes,
}
CODING_ERRORS = {"gzip, cut": (400, "invalid_request"), "lzma": (415, "unsupported_encoding")}
FRAMINGS = ("length", "chunked", "chunked, extended", "chunked, trailers")
BAD_FRAMINGS = ("both", "bad chunk", "folded", "coded")
TARGETS = ("chat", "completions", "chat, absolute", "completions, query")


def framed(drawn: random.Random, framing: str, content: bytes) -> tuple[list[bytes], bytes]:
    """Headers that say how the body is framed, and the framed body."""
    if framing == "length":
        return [b"Content-Length: %d" % len(content)], content
    extension = b";a=b" if framing == "chunked, extended" else b""
    wire = bytearray()
    at = 0
    while at < len(content):
        size = drawn.randrange(1, 200)
        piece = content[at : at + size]
        wire += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        at += size
    trailers = b"x-mine: trailer\r\nx-request-id: t\r\n" if framing == "chunked, trailers" else b""
    wire += b"0\r\n" + trailers + b"\r\n"
    headers = [drawn.choice((b"Transfer-Encoding: chunked", b"transfer-encoding:\tCHUNKED "))]
    if framing == "both":
        headers.append(b"content-length: %d" % len(wire))
    elif framing == "coded":
        headers = [b"transfer-encoding: gzip, chunked"]
    elif framing == "folded":
        headers = [b"transfer-encoding:\r\n chunked"]
    elif framing == "bad chunk":
        wire[:0] = b"0x1\r\n"
    return headers, bytes(wire)


def make(case: Case, number: str) -> Made:
    drawn = random.Random(case.seed)
    path = "/v1/chat/completions" if case.target.startswith("chat") else "/v1/completions"
    shown = joined(drawn, members(drawn, path, case.damage))
    body = (drawn.choice(SPACES) + shown + drawn.choice(SPACES)).encode()
    body = BREAK.get(case.damage, lambda drawn, body: body)(drawn, body)
    headers, wire = framed(drawn, case.framing, CODINGS[case.coding](body))
    if case.coding:
        headers.append(b"content-encoding: " + case.coding.partition(",")[0].encode())
    headers.append(drawn.choice((b"Host: x", b"host:x", b"HOST:  x  ")))
    headers.append(b"X-Request-Id: " + number.encode())
    headers.append(b"x-mine: " + number.encode())
    if drawn.randrange(8) == 0:
        headers.append(b"Expect: 100-continue")
    drawn.shuffle(headers)
    target = path + ("?a=b%20c" if case.target.endswith("query") else "")
    if case.target.endswith("absolute"):
        target = "http://elsewhere" + target
    start = b"POST %b HTTP/1.1\r\n" % target.encode()
    request = start + b"\r\n".join(headers) + b"\r\n\r\n" + wire
    return Made(number, request, case.pieces, body, _error(case))


def _error(case: Case) -> tuple[int, str] | None:
    if case.framing in BAD_FRAMINGS:
        return 400, "bad_http"
    if case.coding in CODING_ERRORS:
        return CODING_ERRORS[case.coding]
    return DAMAGES.get(case.damage)
