"""A lean HTTP/1.1 server: httptools for parsing, one protocol object per connection.

No task per request: a handler is a plain function that answers its exchange at once or keeps
it and answers later. Responses of one connection leave in the order of its requests.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, cast
from urllib.parse import parse_qs

import httptools

from loadgen.replica.clock import Clock

_MAX_BODY_BYTES = 128 * 1024 * 1024
_MAX_PIPELINED = 32
_CLOSE_TIMEOUT_S = 5.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = "application/json"
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class HTTPRequest(NamedTuple):
    """One parsed request; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    http_1_0: bool
    query: str = ""

    def argument(self, name: str, default: str = "") -> str:
        """The last value of a query parameter."""
        return parse_qs(self.query).get(name, [default])[-1]

    def arguments(self, name: str) -> list[str]:
        """All values of a query parameter."""
        return parse_qs(self.query).get(name, [])


class Exchange:
    """One request and its answer.

    `on_abandoned` is called once if the client leaves before the answer is complete; sending
    after that is ignored.
    """

    def __init__(self, request: HTTPRequest, connection: Connection | None) -> None:
        self.request = request
        self.on_abandoned: Callable[[], None] | None = None
        self._connection: Connection | None = connection
        self._chunked = not request.http_1_0

    @property
    def open(self) -> bool:
        """Whether the client still waits for (the rest of) the answer."""
        return self._connection is not None

    @property
    def connection(self) -> Connection | None:
        """Where the answer goes, None once it is complete or nobody waits for it."""
        return self._connection

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = _JSON,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a whole answer; one without a body has no type."""
        fields = {**({"content-type": content_type} if body else {}), **(headers or {})}
        fields["content-length"] = str(len(body))
        self.write(self.head(status, fields, self.request.keep_alive) + body)
        self._finish(close=not self.request.keep_alive)

    def start_stream(self, content_type: str, headers: dict[str, str] | None = None) -> None:
        """Begin a 200 answer whose length is not known."""
        fields = {"content-type": content_type, **(headers or {})}
        if self._chunked:
            fields["transfer-encoding"] = "chunked"
        self.write(self.head(200, fields, self.request.keep_alive and self._chunked))

    def send(self, data: bytes) -> None:
        """One more piece of a streamed answer."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end_stream(self) -> None:
        """Complete a streamed answer."""
        if self._chunked:
            self.write(b"0\r\n\r\n")
        self._finish(close=not (self.request.keep_alive and self._chunked))

    def abandoned(self) -> None:
        """The connection is gone."""
        self._connection = None
        callback, self.on_abandoned = self.on_abandoned, None
        if callback is not None:
            callback()

    def cut(self, *, reset: bool) -> None:
        """Break the connection off once what was written has left: with RST, or with FIN."""
        if self._connection is not None:
            self._connection.cut(reset=reset)

    def head(self, status: int, fields: dict[str, str], keep_alive: bool) -> bytes:
        """The bytes of an answer's head."""
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
        if self._connection is not None:
            lines.append(f"date: {self._connection.clock.date()}")
        lines.append("server: uvicorn")
        lines += [f"{name}: {value}" for name, value in fields.items()]
        if not keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def write(self, data: bytes) -> None:
        """Raw bytes to the client."""
        if self._connection is not None:
            self._connection.write(data)

    def _finish(self, *, close: bool) -> None:
        connection, self._connection = self._connection, None
        self.on_abandoned = None
        if connection is not None:
            connection.finished(close=close)


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """Parses requests and hands them to `handler`, one at a time."""

    def __init__(self, handler: Handler, connections: set[Connection], clock: Clock) -> None:
        self.clock = clock
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None
        self._pipelined: deque[HTTPRequest] = deque()
        self._closing = False
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self, *, close: bool) -> None:
        """The current exchange is answered; go on with the next one."""
        self._current = None
        if close or self._closing:
            self.shut()
        elif self._pipelined:
            self._begin(self._pipelined.popleft())
            self._resume()

    def shut(self) -> None:
        """Close once what was written has left."""
        self._closing = True
        if self._current is None and self._transport is not None:
            self._transport.close()

    def cut(self, *, reset: bool) -> None:
        """Close in the middle of an answer."""
        transport = self._transport
        if transport is None:
            return
        if reset:
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
        transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        self._pipelined.clear()
        current, self._current = self._current, None
        if current is not None:
            current.abandoned()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, b"Upgrades are not supported.")
        except httptools.HttpParserError:
            self._refuse(400, b"Invalid HTTP request received.")

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._current is None:
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MAX_BODY_BYTES:
            raise httptools.HttpParserError("body too large")

    def on_message_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        request = HTTPRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            headers=self._headers,
            body=bytes(self._body),
            keep_alive=self._parser.should_keep_alive(),
            http_1_0=self._parser.get_http_version() == "1.0",
            query=query,
        )
        if self._current is None and not self._closing:
            self._begin(request)
            return
        self._pipelined.append(request)
        if len(self._pipelined) >= _MAX_PIPELINED and self._transport is not None:
            self._transport.pause_reading()

    def _begin(self, request: HTTPRequest) -> None:
        self._current = Exchange(request, self)
        self._handler(self._current)

    def _resume(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def _refuse(self, status: int, message: bytes) -> None:
        if self._current is None:
            reason = _REASONS[status].encode()
            self.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, reason, len(message), message)
            )
        if self._transport is not None:
            self._transport.close()


class HTTPServer:
    """A listening socket and its connections."""

    def __init__(self, handler: Handler, clock: Clock | None = None) -> None:
        self._handler = handler
        self._clock = clock or Clock()
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one, which `port` then tells."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections, self._clock),
            host,
            port,
            backlog=2048,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        # Connections learn of their end from the loop, not from `abort`.
        await asyncio.sleep(0)
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await self._server.wait_closed()
