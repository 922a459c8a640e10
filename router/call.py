"""One request being served: what was received, how far the answer has come, and its deadline."""

from __future__ import annotations

import asyncio
import time

from router.errors import ClientGone, RequestError
from router.placement import Placement
from router.upstream import Exchange, Headers
from router.wire import Receive, Scope, Send, request_id


class Call:
    """Shared by the relay's steps and the two callbacks that may end a request early.

    These are the client leaving (`watch`) and the deadline (`arm`): a timer that cancels the
    request's task, which costs a fifth of an `asyncio.timeout` block.
    """

    __slots__ = (
        "_loop",
        "_task",
        "_timer",
        "exchange",
        "expired",
        "gone",
        "headers",
        "path",
        "placement",
        "receive",
        "request_id",
        "send",
        "started",
        "started_at_s",
        "status",
        "target",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        self.target = self.path.encode() + (b"?" + query if query else b"")
        self.headers: Headers = scope["headers"]
        self.receive = receive
        self.send = send
        self.request_id = request_id(self.headers)
        self.started_at_s = time.perf_counter()
        self.exchange: Exchange | None = None
        self.placement: Placement | None = None
        self.gone = False
        self.started = False
        self.status = 0
        self.expired: RequestError | None = None
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, seconds: float, error: RequestError) -> None:
        """Set the deadline, in place of the present one; `error` is the answer past it."""
        self.disarm()
        self._timer = self._loop.call_later(seconds, self._expire, error)

    def disarm(self) -> None:
        """No deadline from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, error: RequestError) -> None:
        self.expired = error
        if self._task is not None:
            self._task.cancel()

    def watch_in_background(self) -> asyncio.Task[None]:
        """A task that runs `watch`; to be cancelled when the call is over."""
        return self._loop.create_task(self.watch())

    async def watch(self) -> None:
        """Wait for the client to leave, then end the upstream request."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.exchange is not None:
            self.exchange.abort()

    def check(self) -> None:
        """Raise ClientGone once the client has left."""
        if self.gone:
            raise ClientGone
