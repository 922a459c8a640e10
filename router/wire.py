"""HTTP as the relay handles it: reading a bounded body, which headers pass, answers of our own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from random import getrandbits
from typing import Any

import httpx
from xxhash import xxh3_128_hexdigest

from router.encoding import decoder_for
from router.errors import BodyTooLarge, ClientGone, RequestError, Shape
from router.upstream import Headers

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_ANSWER_BYTES = 16 << 20
"""Of a replica to a question of ours."""
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 7.6.1: these belong to one connection."""
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",
    b"expect",
    b"x-request-id",
}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACE_ID = re.compile(rb"(?!0{32})[0-9a-f]{32}")


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header; `name` is lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def request_id(headers: Headers) -> bytes:
    """The client's x-request-id where it is usable, else one of our own."""
    given = header(headers, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"%032x" % getrandbits(128)


def forwarded(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """End-to-end headers: all but `dropped` and what the Connection header names."""
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = dropped | {part.strip().lower() for part in b",".join(named).split(b",")}
    return [pair for pair in headers if pair[0] not in dropped]


def traceparent(request_id: bytes) -> bytes:
    """The head of a new trace (W3C Trace Context), whose id is the request id where that fits.

    Marked as sampled, because engines take an unsampled parent for an order to record nothing.
    """
    fits = _TRACE_ID.fullmatch(request_id)
    trace_id = request_id if fits else xxh3_128_hexdigest(request_id).encode()
    return b"00-%b-%016x-01" % (trace_id, getrandbits(64) or 1)


def upstream_headers(
    headers: Headers, host: bytes, request_id: bytes, rank: int | None, *, trace: bool = False
) -> Headers:
    """A request's headers as the replica gets them; its body goes on without any coding.

    `trace`: one that belongs to no trace begins one.
    """
    passed = forwarded(headers, _NOT_FORWARDED)
    if trace and header(passed, b"traceparent") is None:
        passed.append((b"traceparent", traceparent(request_id)))
    if rank is not None:
        passed = [pair for pair in passed if pair[0] != b"x-data-parallel-rank"]
        passed.append((b"x-data-parallel-rank", b"%d" % rank))
    return [(b"host", host), (b"x-request-id", request_id), *passed]


async def read_body(headers: Headers, receive: Receive, *, max_bytes: int) -> bytes:
    """The whole body, decoded; `max_bytes` holds for what arrives and for what it decodes to.

    Raises BodyTooLarge, UnsupportedEncoding, InvalidRequest for a corrupt coding, ClientGone.
    """
    decoder = decoder_for(headers)
    declared = header(headers, b"content-length")
    if declared is not None and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    arrived = decoded = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        more = message.get("more_body", False)
        arrived += len(part)
        for piece in (part,) if decoder is None else decoder.feed(part):
            decoded += len(piece)
            if max(arrived, decoded) > max_bytes:
                raise _too_large(max_bytes)
            parts.append(piece)
            if decoder is not None:
                await asyncio.sleep(0)  # a piece takes long enough to let others in between
    if decoder is not None:
        decoder.end()
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_answer(answer: httpx.Response) -> bytes:
    """The body of a replica's answer to a question of ours. Raises ValueError past its bound."""
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes (max_body_bytes).")


async def send_error(
    send: Send, error: RequestError, extra: Headers, shape: Shape, request_id: str
) -> None:
    """Answer with an error of our own. The connection closes: its body may be half read."""
    body = error.body(shape, request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *error.headers(),
        *extra,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
