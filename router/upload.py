"""Forms that are streamed through: read until the `model` field is known, then passed on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

from router.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    InvalidRequest,
    UnsupportedEncoding,
)
from router.upstream import Headers
from router.wire import Receive, header

_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,70})"?', re.IGNORECASE)


class Upload(NamedTuple):
    """What has arrived of a form, and whether that is all of it."""

    model: str | None
    buffered: bytes
    complete: bool


GATHERED_BYTES = 4 << 20
GATHER_S = 1.0
"""A form of no more, that arrives in no longer, is sent once it is whole: a replica that dies then
costs nothing, as the form can be sent again, and an engine begins with a whole form in any case."""


async def read_form(
    headers: Headers, receive: Receive, *, max_bytes: int, gather_s: float = GATHER_S
) -> Upload:
    """Read until the form's `model` field has arrived, or all of it; a small one to its end.

    Raises InvalidRequest for what is no form, BodyTooLarge, UnsupportedEncoding, ClientGone.
    """
    if header(headers, b"content-encoding") not in (None, b"", b"identity"):
        raise UnsupportedEncoding("Compressed forms are not accepted; send the form uncompressed.")
    declared = header(headers, b"content-length")
    if declared is not None and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    field = _model_field(header(headers, b"content-type") or b"")
    buffer = bytearray()
    searched = 0
    while True:
        part, more = await next_part(receive)
        buffer += part
        if len(buffer) > max_bytes:
            raise _too_large(max_bytes)
        found = field.search(buffer, max(searched - 1024, 0))
        searched = len(buffer)
        if found or not more:
            model = found.group(1).decode("utf-8", "replace") if found else None
            if more and declared is not None and int(declared) <= GATHERED_BYTES:
                more = await _gather(receive, buffer, gather_s)
            return Upload(model, bytes(buffer), not more)


async def _gather(receive: Receive, buffer: bytearray, gather_s: float) -> bool:
    """Read on for a moment; whether more will follow. Its length has been declared: no bound."""
    more = True
    with suppress(TimeoutError):
        async with asyncio.timeout(gather_s):
            while more:
                part, more = await next_part(receive)
                buffer += part
    return more


def _model_field(content_type: bytes) -> re.Pattern[bytes]:
    boundary = _BOUNDARY.search(content_type)
    if boundary is None or not content_type.lower().startswith(b"multipart/form-data"):
        raise InvalidRequest("This route takes multipart/form-data with a boundary.")
    return re.compile(
        rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n--'
        + re.escape(boundary.group(1))
    )


async def rest_of(
    receive: Receive, already_bytes: int, max_bytes: int, idle_s: float
) -> AsyncIterator[bytes]:
    """What has not arrived yet. Raises BodyTooLarge, ClientGone; BodyTimeout after a pause.

    Only the client's pauses count: while the replica does not read, nobody asks for a piece.
    """
    size = already_bytes
    more = True
    while more:
        try:
            async with asyncio.timeout(idle_s):
                part, more = await next_part(receive)
        except TimeoutError:
            message = f"Nothing more of the form arrived within {idle_s:g} s (body_timeout_s)."
            raise BodyTimeout(message) from None
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if part:
            yield part


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The form is larger than {max_bytes} bytes (max_body_bytes).")


async def next_part(receive: Receive) -> tuple[bytes, bool]:
    """The next bytes of a body and whether more will follow. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), bool(message.get("more_body"))
