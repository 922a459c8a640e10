"""One answer to a client: uvicorn's response cycle, which also ends where it should.

Beyond uvicorn's: an answer given before the request had arrived in full, or while the gateway
drains, is the connection's last and says so; HTTP/1.0 clients, who do not know chunks, get answers
of unknown length delimited by the connection's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from router.errors import RequestError

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class AnswerSide:
    """The transport as an answer sees it; closing it is the connection's decision.

    An answer's head waits for the first bytes of its body and goes out with them: one system call
    and one packet for what is usually a whole answer, or a stream's first token.
    """

    __slots__ = ("_close", "_head", "_holding", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self._holding = False
        self._head = b""
        self.is_closing = transport.is_closing

    def hold(self) -> None:
        """What is written next is a head."""
        self._holding = True

    def write(self, data: bytes) -> None:
        """Write, or keep a head for what follows it."""
        if self._holding:
            self._holding = False
            self._head = data
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """The answer is over: whole, or broken off."""
        if self._head:
            self.write(b"")
        self._close()


class Answer(RequestResponseCycle):
    """`is_last` is asked when the answer begins: whether the connection ends with it."""

    until_close = False

    def __init__(self, *, is_last: Callable[[], bool], **cycle: Any) -> None:
        super().__init__(**cycle)
        self._is_last = is_last
        self._side: AnswerSide = cycle["transport"]

    async def send(self, message: ASGISendEvent) -> None:
        """The ASGI entry."""
        if self.until_close:
            await self._send_until_close(cast("dict[str, Any]", message))
            return
        if not self.response_started and message["type"] == "http.response.start":
            if self.more_body or self._is_last():
                self.keep_alive = False
            if self.scope["http_version"] == "1.0" and self.scope["method"] != "HEAD":
                self._leave_out_chunks(message.get("headers", ()))
            if self.scope["method"] != "HEAD":
                self._side.hold()
        await super().send(message)

    def _leave_out_chunks(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if not any(name.lower() == b"content-length" for name, _ in headers):
            self.chunked_encoding = False
            self.until_close = True

    async def _send_until_close(self, message: dict[str, Any]) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.transport.write(message.get("body", b""))
        if not message.get("more_body"):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()

    async def send_500_response(self) -> None:
        """What uvicorn answers where the application failed, in OpenAI's shape."""
        body = RequestError("The gateway failed; the log says why.").body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def whole_answer(error: RequestError, request_id: bytes) -> bytes:
    """An error as the bytes of a whole response, the connection's last."""
    body = error.body(request_id=request_id.decode())
    more = [b"%b: %b\r\n" % pair for pair in error.headers()]
    return b"".join(
        (
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n" % len(body),
            *more,
            b"x-kvroute-request-id: %b\r\n\r\n" % request_id,
            body,
        )
    )
