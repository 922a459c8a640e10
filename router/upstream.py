"""Lean HTTP/1.1 connections to replicas: one protocol object per connection, one pool per replica.

An `Exchange` is one request on one connection:

    open --head()--> head arrived --read()*--> b"" (end): the connection returns to its pool
      |                  |
      +-- UpstreamUnavailable
                         +-- UpstreamCut, abort(): the connection is closed

Bytes move from the socket's callback into a bounded buffer; past the bound the socket is paused,
so a slow client slows the replica and not the gateway's memory. What a replica says when it was
not asked, or after the end of its answer, ends the connection: it must never answer the next one.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from router.errors import Overloaded, UpstreamCut, UpstreamError, UpstreamUnavailable

READ_AHEAD_BYTES = 64 << 10
"""What is held of a body before its socket is paused; one more read of the loop comes on top."""
JOINED_BYTES = 256 << 10
"""Larger requests are not copied to be sent in one piece."""
MAX_HEAD_BYTES = 64 << 10
BODILESS = (204, 304)
"""What these say of a length is said of another answer's body."""

OUR_OWN_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
)
"""Connecting failed for want of something of ours; the replica is not to blame."""

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class ResponseHead:
    """Status and headers of a response; names are lower case."""

    status: int
    headers: Headers = field(default_factory=list)


class Exchange(asyncio.Protocol):
    """One connection, carrying one exchange at a time."""

    def __init__(self, pool: ReplicaPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self.loop = loop
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self.reused = False
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._asked = False
        self._sent = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head_bytes = 0
        self._header_bytes = 0
        self._head: ResponseHead | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._complete = False
        self._framed = False
        self._reusable = False
        self._no_body = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._enough: asyncio.Future[None] | None = None

    # What a request does with it

    @property
    def untouched(self) -> bool:
        """Nothing of a response has arrived."""
        return not self._head_bytes

    async def send(self, head: bytes, body: bytes, method: bytes) -> None:
        """Write a request, whole or its first part. It is in memory: nothing here waits for the
        replica to read it, so that the limits of `head` hold from now on.
        """
        self._no_body = method == b"HEAD"
        if self._transport is None or self._closed:
            raise UpstreamUnavailable("the connection is closed")
        self._asked = self._sent = True
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def send_on(
        self,
        parts: AsyncIterator[bytes],
        *,
        chunked: bool,
        idle_s: float,
        look: Callable[[], None],
        look_s: float,
    ) -> None:
        """Write the rest of a body as it arrives, unless the replica answers before its end.

        `look` is called each `look_s` while the replica reads nothing. Raises what it and `parts`
        raise; TimeoutError when the replica reads nothing for `idle_s`.
        """
        self._sent = False
        self._enough = self.loop.create_future()
        while not self._enough.done():
            end_s = self.loop.time() + idle_s
            while self._drain is not None:
                left_s = end_s - self.loop.time()
                if left_s <= 0:
                    raise TimeoutError("the replica reads nothing")
                done, _ = await asyncio.wait((self._drain,), timeout=min(left_s, look_s))
                if not done:
                    look()
            part = await self._unless_enough(parts)
            if self._transport is None or self._closed or self._head is not None:
                return
            if part is None:
                if chunked:
                    self._transport.write(b"0\r\n\r\n")
                self._sent = True
                return
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)

    async def _unless_enough(self, parts: AsyncIterator[bytes]) -> bytes | None:
        """The next part; None at the end, and when no more is wanted, however slow the client."""
        step = asyncio.ensure_future(anext(parts, None))
        enough: Any = self._enough
        try:
            await asyncio.wait((step, enough), return_when=asyncio.FIRST_COMPLETED)
            return step.result() if step.done() else None
        finally:
            step.cancel()

    async def head(self, limit_s: float) -> ResponseHead:
        """The response head, once something of the body is there too, or all of it.

        Engines send a stream's head long before its first token. Until then nothing is lost by
        asking another replica. Raises UpstreamUnavailable, TimeoutError after `limit_s`.
        """
        end_s = self.loop.time() + limit_s
        while self._head is None or not (self._chunks or self._complete):
            if self._error is not None:
                raise UpstreamUnavailable(str(self._error)) from self._error
            await self._wait(end_s - self.loop.time())
        return self._head

    async def read(self, idle_s: float) -> bytes:
        """All that has arrived of the body, b"" at its end. Raises UpstreamCut, TimeoutError."""
        while not self._chunks:
            if self._complete:
                return b""
            if self._error is not None:
                raise UpstreamCut(str(self._error)) from self._error
            await self._wait(idle_s)
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def ended(self) -> bool:
        """The whole response has arrived and been read."""
        return self._complete and not self._chunks

    def release(self) -> None:
        """Give the connection back to its pool; an unfinished exchange is aborted instead."""
        if self.ended and self._reusable and self._error is None and self._all_sent():
            self._reset()
            self.reused = True
            self._pool.put(self)
        else:
            self.abort()

    def _all_sent(self) -> bool:
        """The replica has, or will get, the whole request: what follows is the next one."""
        transport = self._transport
        if self._closed or transport is None:
            return False
        return self._sent and not transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once: the engine ends a request whose connection closes."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, idle_s: float) -> None:
        self._waiter = self.loop.create_future()
        timer = self.loop.call_later(idle_s, self._expire, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    @staticmethod
    def _expire(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError("the replica was silent for too long"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete or not self._asked:
            self._break("bytes that belong to no response")
            return
        self._pool.heard += 1
        if self._head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            reason = cause if isinstance(cause, UpstreamCut) else f"not an HTTP response: {error}"
            self._break(str(reason))
            return
        if self._head is None and self._head_bytes > MAX_HEAD_BYTES:
            self._break("the response head is too large")
        self._wake()

    def _break(self, message: str) -> None:
        self.abort()
        self._fail(UpstreamCut(message))

    def eof_received(self) -> None:
        if self._head is not None and not self._framed:
            self._complete = True
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._pool.discard(self)
        if self._head is not None and not self._framed and exc is None and self._error is None:
            self._complete = True
        if not self._complete:
            self._fail(UpstreamCut(str(exc) if exc else "the replica closed the connection"))
        self._wake()
        self._stop_sending()

    def _stop_sending(self) -> None:
        """An answer, or the end, is not held up by a body that nobody reads or sends."""
        if self._enough is not None and not self._enough.done():
            self._enough.set_result(None)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._drain = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)
        self._drain = None

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:  # raised through the parser, which then reads no further
            raise UpstreamCut("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEAD_BYTES:
            raise UpstreamCut("the response's headers or trailers are too large")
        if self._head is None:  # trailers are not headers: RFC 9110, 6.5.1
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # 100 Continue and early hints precede the real head
            self._headers = []
            return
        if not 200 <= status <= 599:
            raise UpstreamCut(f"{status} is no status")
        names = {name for name, _ in self._headers}
        if b"transfer-encoding" in names:
            self._check_coding()
        self._head = ResponseHead(status, self._headers)
        bodiless = self._no_body or status in BODILESS
        self._framed = bodiless or bool(names & {b"content-length", b"transfer-encoding"})
        self._reusable = self._framed and self._parser.should_keep_alive()
        if bodiless:
            self._complete = True
        self._stop_sending()

    def _check_coding(self) -> None:
        """Chunks are taken off here; any other coding would reach a client that is not told."""
        for name, value in self._headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise UpstreamCut("a transfer coding that was not asked for")

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > READ_AHEAD_BYTES and not self._paused and self._transport:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._complete = True


class ReplicaPool:
    """Connections to one replica: idle ones are reused, last used first.

    `heard` counts what has come from the replica, on whichever connection: it lives.
    """

    def __init__(
        self, host: str, port: int, *, connect_timeout_s: float, keepalive_s: float
    ) -> None:
        self._address = (host, port)
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._idle: list[Exchange] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.heard = 0

    async def acquire(self, *, fresh: bool = False) -> Exchange:
        """An idle connection, or a new one. Raises UpstreamUnavailable."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        oldest_s = loop.time() - self._keepalive_s
        while self._idle and not fresh:
            exchange = self._idle.pop()
            if exchange.idle_since_s >= oldest_s:
                return exchange
            exchange.abort()
        return await self._connect(loop)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Exchange:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, exchange = await loop.create_connection(
                    lambda: Exchange(self, loop), *self._address
                )
        except TimeoutError:
            raise UpstreamUnavailable("connecting timed out") from None
        except OSError as error:
            if error.errno in OUR_OWN_LIMITS:
                message = f"The gateway cannot open another connection: {error.strerror}."
                raise Overloaded(message) from error
            raise UpstreamUnavailable(f"connecting failed: {error}") from error
        return exchange

    def put(self, exchange: Exchange) -> None:
        """Keep a connection whose exchange has ended."""
        exchange.idle_since_s = exchange.loop.time()
        self._idle.append(exchange)

    def discard(self, exchange: Exchange) -> None:
        """Forget a connection that was closed."""
        if exchange in self._idle:
            self._idle.remove(exchange)

    def close_idle(self, older_than_s: float = 0.0) -> None:
        """Close what has been idle for longer; called by the prober and at exit."""
        limit_s = asyncio.get_running_loop().time() - older_than_s
        for exchange in [each for each in self._idle if each.idle_since_s <= limit_s]:
            exchange.abort()
            self.discard(exchange)


def request_head(method: bytes, target: bytes, headers: Headers, body_bytes: int | None) -> bytes:
    """The request's first bytes; a body of unknown length is chunked.

    `headers` carry no framing and no hop-by-hop field.
    """
    lines = [b"%b %b HTTP/1.1\r\n" % (method, target)]
    lines += [b"%b: %b\r\n" % pair for pair in headers]
    framing = b"transfer-encoding: chunked" if body_bytes is None else _length(method, body_bytes)
    lines.append(framing + b"\r\n\r\n" if framing else b"\r\n")
    return b"".join(lines)


def _length(method: bytes, body_bytes: int) -> bytes:
    bare = not body_bytes and method in (b"GET", b"HEAD", b"DELETE")
    return b"" if bare else b"content-length: %d" % body_bytes
