"""A client's connection: uvicorn's HTTP/1.1 protocol with limits, deadlines and a clean end.

    idle --> head --> body --> answer --> idle ...
      |        |        |         |
      |        +- 408, 414, 431, 400: `_refuse`, then linger
      +- idle timeout             +- the client's FIN: it has left

Requests of one connection are served one after the other. A request that is refused never reaches
the application; one that turns bad within its body ends as if the client had left. An answer that
comes before its request was complete is followed by a linger: our side is closed, and what the
client still sends is read and dropped, since closing at once would reset the connection and could
take the answer with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.answer import Answer, AnswerSide
from router.call import CONNECTION_KEY
from router.clients import CLIENTS_KEY, Clients
from router.errors import (
    BadHttp,
    HeadTimeout,
    HeadTooLarge,
    RequestError,
    TargetTooLong,
    TooManyConnections,
)
from router.framing import check_head, framing_of, split_target

logger = logging.getLogger("kvroute.connection")

LINGER_S = 10.0
FLUSH_S = 30.0
"""How long a client may take to read the last bytes of a connection that is being closed."""
FULL_LINGER_S = 1.0
MAX_TOLD = 512
"""Connections beyond `max_connections` that are told so; those beyond are cut."""
MAX_PIPELINED = 8
"""Requests that wait for the answer before theirs; with more, the connection is not read."""


class ClientConnection(HttpToolsProtocol):
    """Serves one client. `on_gone` is called when the client leaves while it is set."""

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.on_gone: Callable[[], None] | None = None
        self._clients: Clients = app_state[CLIENTS_KEY]
        self._limits = self._clients.settings
        self.timeout_keep_alive = self._limits.client_idle_timeout_s
        self._running: Answer | None = None
        self._in_head = False
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._steps = 0
        self._framing = b""
        self._deaf = False
        self._lingering = False
        self._ended = False
        self._refusal: bytes | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    @property
    def request_complete(self) -> bool:
        """Whether all of the running request has arrived."""
        return self._running is not None and not self._running.more_body

    # The transport's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or say that there are too many."""
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio leaves this out for listeners that were made without naming TCP.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._side = cast("asyncio.Transport", AnswerSide(transport, self._answer_over))
        excess = self._clients.came() - self._limits.max_connections
        if excess > MAX_TOLD:
            transport.abort()
        elif excess > 0:
            message = "Too many connections (max_connections); try again later."
            self._refuse(TooManyConnections(message), FULL_LINGER_S)
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it whoever waited for an answer."""
        self._clients.left()
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._lose_running()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has closed its side: it has left, or (a setting) only has no more to say."""
        self._ended = True
        running = self._running
        if running is None:
            self._finish()
            return None
        if self._limits.tolerate_half_close and not running.more_body:
            if self.pipeline and self.cycle.more_body:
                self.pipeline.popleft()
            return True
        self.transport.abort()
        return None

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; bounded, whatever it is."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        steps = self._steps
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_reason(error))
            return
        if self._steps != steps:
            self._unparsed_bytes = 0
        else:
            # A head, a chunk's extensions or trailers that go on and on.
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._limits.max_head_bytes:
                self._refuse(self._too_large())
                return
        if (self._in_head or self._running is None) and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._late)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # An offer that we do not take up: what follows is HTTP/1.1 as before.
                data = data[upgrade.args[0] :]
                if self._framing:
                    self._parse_body()
            else:
                return

    def _parse_body(self) -> None:
        """The parser takes an upgrade for granted and a body for the other protocol's bytes.

        So one that has seen the same framing, and no offer, goes on from here.
        """
        head = b"POST / HTTP/1.1\r\n%b\r\n\r\n" % self._framing
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head)
        self._framing = b""

    # The parser's callbacks

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._framing:
            return
        self._in_head = True
        self._head_bytes = 0
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if self._framing:
            return
        self.url += url
        self._head_bytes += len(url)
        if len(self.url) > self._limits.max_target_bytes:
            limit = self._limits.max_target_bytes
            raise TargetTooLong(f"The URL is longer than {limit} bytes (max_target_bytes).")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer: those are bounded and dropped."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.max_head_bytes:
            raise self._too_large()
        if not self._in_head:
            return
        if len(self.headers) >= self._limits.max_headers:
            limit = self._limits.max_headers
            raise HeadTooLarge(f"The request has more than {limit} headers (max_headers).")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A whole head: refused by raising, else the request begins or waits for its turn."""
        if self._framing:
            return
        self._in_head = False
        self._steps += 1
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        version = self.parser.get_http_version()
        method = self.parser.get_method().decode("ascii")
        waits = check_head(method, version, self.headers)
        if self.parser.should_upgrade():
            self._framing = framing_of(self.headers)
        self.scope = self._scope(method, version)
        answer = Answer(
            is_last=self._is_last,
            scope=self.scope,
            transport=self._side,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=waits,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle = answer
        if self._running is None:
            self._start(answer)
            return
        self.pipeline.appendleft((answer, self.app))
        if len(self.pipeline) > MAX_PIPELINED:
            self.flow.pause_reading()

    def _scope(self, method: str, version: str) -> Any:
        raw_path, query = split_target(self.url)
        path = raw_path.decode("latin-1")
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": {},
            CONNECTION_KEY: self,
        }

    def on_body(self, body: bytes) -> None:
        """A piece of a body; beyond what is read of it, the client is held up."""
        self._steps += 1
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.waiting_for_100_continue = False
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """A whole request."""
        if self._framing:
            return
        self._steps += 1
        self.cycle.more_body = False
        self.cycle.message_event.set()
        if len(self.pipeline) <= MAX_PIPELINED:
            # A client that leaves during the answer is only noticed while it is read.
            self.flow.resume_reading()

    # Requests one after the other

    def _start(self, answer: Answer) -> None:
        self._running = answer
        self._start_asgi_task(answer, self.app)

    def on_response_complete(self) -> None:
        """An answer is out: on with the next request, or wait for one."""
        self.server_state.total_requests += 1
        self._running = None
        if self._lingering or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start(cast("Answer", self.pipeline.pop()[0]))
        elif self._refusal is not None:
            self._say_last(self._refusal, LINGER_S)
        elif self._ended:
            self._finish()
        elif not self._in_head:
            self._await_request()

    def _await_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for too long."""
        self._finish()

    def _is_last(self) -> bool:
        return self._clients.draining or self._ended

    def _lose_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.disconnected = True
            running.waiting_for_100_continue = False
            running.message_event.set()
            self.flow.resume_writing()
        if self.on_gone is not None:
            self.on_gone()

    # Refusing and ending

    def _late(self) -> None:
        limit_s = self._limits.head_timeout_s
        message = f"The request's head did not arrive within {limit_s:g} s (head_timeout_s)."
        self._refuse(HeadTimeout(message))

    def _too_large(self) -> HeadTooLarge:
        limit = self._limits.max_head_bytes
        return HeadTooLarge(f"The headers are larger than {limit} bytes (max_head_bytes).")

    def _refuse(self, error: RequestError, linger_s: float = LINGER_S) -> None:
        """Say why and read no more, once the requests before this one have their answers."""
        self._deaf = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        refusal = self._clients.refused(error)
        running = self._running
        if running is not None and (running is not self.cycle or not running.more_body):
            if self.cycle.more_body:
                self.pipeline.popleft()
            self._refusal = refusal
            return
        self._lose_running()
        if running is not None and running.response_started:
            self.transport.abort()
        else:
            self._say_last(refusal, linger_s)

    def _say_last(self, content: bytes, linger_s: float) -> None:
        self.transport.write(content)
        self._linger(linger_s)

    def _answer_over(self) -> None:
        """Close, for an answer: it was the connection's last, or it is broken off."""
        answer = self._running
        if answer is None or not answer.response_complete:
            if answer is not None and answer.until_close:
                self._reset()
            else:
                self._finish()
        elif answer.more_body:
            self._linger(LINGER_S)
        else:
            self._finish()

    def _linger(self, linger_s: float) -> None:
        self._deaf = self._lingering = True
        if self._ended or self.transport.is_closing():
            self._finish()
            return
        self.flow.resume_reading()
        self.transport.write_eof()
        self._abort_after(linger_s)

    def _reset(self) -> None:
        """End as no whole answer ends, where only the connection's end marks that of an answer."""
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _finish(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self._abort_after(FLUSH_S)

    def _abort_after(self, seconds: float) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self.loop.call_later(seconds, self.transport.abort)

    def shutdown(self) -> None:
        """The server is ending: close at once, or after the answer that is being given."""
        if self._running is None:
            self._finish()
        else:
            self._running.keep_alive = False


def _reason(error: httptools.HttpParserError) -> RequestError:
    cause = error.__context__
    if isinstance(cause, RequestError):
        return cause
    if cause is not None:
        logger.error("a request's head could not be handled", exc_info=cause)
    return BadHttp(f"This is not valid HTTP/1.1: {error}.")
