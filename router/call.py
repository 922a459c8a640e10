"""One request being served: what was received, how far the answer has come, and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from router.errors import ClientGone, RequestError
from router.placement import Placement
from router.policy import Choice, Snapshot
from router.routes import Route
from router.upstream import Exchange, Headers
from router.wire import Receive, Scope, Send, request_id

if TYPE_CHECKING:
    from router.planning import Plan

T = TypeVar("T")

CLIENT_LEFT = 499
"""The status of a request whose client left: nginx's number, which nobody receives."""

CONNECTION_KEY = "kvroute.connection"
"""Where our server puts the client's connection in the scope; other servers do not."""


class Connection(Protocol):
    """A client's connection that calls back when it is lost."""

    on_gone: Callable[[], None] | None

    @property
    def request_complete(self) -> bool:
        """Whether all of the running request has arrived."""
        ...


class Attempt(NamedTuple):
    """A decision that came to nothing: its replica was unavailable, or refused."""

    snapshot: Snapshot
    choice: Choice
    on_trial: bool
    outcome: str
    reason: str


class Call:
    """Shared by the relay's steps and the two callbacks that may end a request early.

    These are the client leaving (`leave`) and the deadline (`arm`): a timer that cancels the
    request's task, which costs a fifth of an `asyncio.timeout` block.
    """

    __slots__ = (
        "_connection",
        "_interruptible",
        "_loop",
        "_task",
        "_timer",
        "_watcher",
        "arrived_at_s",
        "attempts",
        "before",
        "before_that",
        "cached_tokens",
        "engine_prompt_tokens",
        "error_code",
        "exchange",
        "expired",
        "first_byte_at_s",
        "first_token_s",
        "gone",
        "headers",
        "is_events",
        "method",
        "model",
        "object_id",
        "on_trial",
        "path",
        "placement",
        "plan",
        "receive",
        "request_id",
        "route",
        "routing_s",
        "send",
        "started",
        "started_at_s",
        "status",
        "tail",
        "target",
    )

    def __init__(
        self,
        route: Route,
        scope: Scope,
        receive: Receive,
        send: Send,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.route = route
        self.method: str = scope["method"]
        self.object_id: str | None = scope.get("path_params", {}).get("object_id")
        self.path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        raw: bytes = scope.get("raw_path") or self.path.encode()
        self.target = raw + (b"?" + query if query else b"")
        self.headers: Headers = scope["headers"]
        self.receive = receive
        self.send = send
        self.request_id = request_id(self.headers)
        self.arrived_at_s = 0.0
        self.started_at_s = time.perf_counter()
        self.exchange: Exchange | None = None
        self.placement: Placement | None = None
        self.gone = False
        self.started = False
        self.status = 0
        self.is_events = False
        self.tail = self.before = self.before_that = b""
        self.expired: RequestError | None = None
        # What a receipt says besides.
        self.plan: Plan | None = None
        self.model: str | None = None
        self.attempts: tuple[Attempt, ...] = ()
        self.on_trial = False
        self.routing_s = 0.0
        self.first_byte_at_s = 0.0
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None
        self.engine_prompt_tokens: int | None = None
        self.error_code = ""
        self._interruptible = False
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._connection: Connection | None = scope.get(CONNECTION_KEY)
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, status: int, *, is_events: bool) -> None:
        """An answer's head is about to be sent; `is_events`: it is a stream of server-sent events.

        From here on `tail` is the last piece of it that was sent, after those `before`; of a large
        one its two ends.
        """
        self.status = status
        self.started = True
        self.is_events = is_events

    def arm(self, seconds: float, error: RequestError) -> None:
        """Set the deadline, in place of the present one; `error` is the answer past it."""
        self.disarm()
        self._timer = self._loop.call_later(seconds, self._expire, error)

    @property
    def body_is_here(self) -> bool:
        """The whole request has arrived already, so that nobody need wait for it."""
        return self._connection is not None and self._connection.request_complete

    def disarm(self) -> None:
        """No deadline from here on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, error: RequestError) -> None:
        self.expired = error
        if self._task is not None:
            self._task.cancel()

    def watch(self) -> None:
        """Have `leave` called when the client leaves: by the connection, else by a task."""
        if self._connection is not None:
            self._connection.on_gone = self.leave
        else:
            self._watcher = self._loop.create_task(self._wait_for_disconnect())

    def unwatch(self) -> None:
        """The call is over; the connection may go on with another."""
        if self._connection is not None:
            self._connection.on_gone = None
        if self._watcher is not None:
            self._watcher.cancel()

    def leave(self) -> None:
        """The client has left: end the upstream request."""
        self.gone = True
        if self.exchange is not None:
            self.exchange.abort()
        elif self._interruptible and self._task is not None:
            self._task.cancel()

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """Its result. Cancels it and raises ClientGone as soon as the client leaves."""
        self._interruptible = True
        try:
            return await work
        except asyncio.CancelledError:
            if not self.gone or self._task is None or self._task.uncancel():
                raise
            raise ClientGone from None
        finally:
            self._interruptible = False

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def check(self) -> None:
        """Raise ClientGone once the client has left."""
        if self.gone:
            raise ClientGone
