"""The hot path: one request from the client's bytes to the end of its answer.

    body --> plan --> place --> open --> forward --> done
      |       |        ^         |          |
      +- 4xx -+        +- again -+          +- cut: SSE error event, no [DONE],
                    (nothing of an              aborted transfer
                     answer had arrived)

planning.py reads and refuses, dispatch.py places and sends, forward.py passes the answer on. Here
stands what holds for every request: its deadline, its errors, its account. The client's bytes go
upstream unchanged. Whatever ends a request, its ticket gives its load back and its connection is
either reusable or closed; a client that leaves closes the upstream at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.responses import Response

from router import access
from router.call import CLIENT_LEFT, Call
from router.config import Settings
from router.dispatch import Dispatcher
from router.errors import (
    AnswerCut,
    BodyTimeout,
    ClientGone,
    InvalidRequest,
    KvrouteError,
    Overloaded,
    ReplicaTimeout,
    RequestError,
    ShuttingDown,
)
from router.forward import cut, own_headers
from router.metrics import Metrics
from router.planning import Planner
from router.receipts import Receipts
from router.routes import Route
from router.wire import Receive, Scope, Send, header, send_error

logger = logging.getLogger("kvroute.relay")

RELAYED_KEY = "kvroute.relayed"
"""Put in the scope of a request that comes by way of the framework: the relay accounts for it."""
GOODBYE_S = 1.0
"""How long a client may take to make room for the end of its answer."""


class Relay:
    """Serves every data route."""

    def __init__(
        self,
        settings: Settings,
        planner: Planner,
        dispatcher: Dispatcher,
        metrics: Metrics,
        receipts: Receipts,
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._receipts = receipts
        self._inflight = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._inflight

    async def serve(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; never raises but when it is cancelled twice."""
        if self._loop is None:
            # Kept, because asking for the running loop is a system call in Python 3.11.
            self._loop = asyncio.get_running_loop()
        call = Call(route, scope, receive, send, self._loop)
        self._inflight += 1
        self._receipts.began(call)
        try:
            await self._serve(call)
        except ClientGone:
            call.status = CLIENT_LEFT
        except asyncio.CancelledError:
            # Without a deadline of its own, it is the server that ends what has not drained.
            await self._end_badly(call, call.expired or ShuttingDown())
        except TimeoutError:
            message = "The replica was silent for too long (first_byte_timeout_s, idle_timeout_s)."
            await self._end_badly(call, ReplicaTimeout(message))
        except RequestError as error:
            await self._end_badly(call, error)
        except KvrouteError as error:
            await self._end_badly(call, AnswerCut(str(error)))
        except Exception:
            logger.exception("request %s failed", call.request_id.decode())
            await self._end_badly(call, RequestError("The gateway failed; the log says why."))
        finally:
            call.disarm()
            call.unwatch()
            self._inflight -= 1
            self._account(call)

    async def _serve(self, call: Call) -> None:
        settings = self._settings
        if self._inflight > settings.max_inflight:
            raise Overloaded("Too many requests at once (max_inflight); try again later.")
        if not call.body_is_here:
            slow = f"The request body did not arrive within {settings.body_timeout_s:g} s."
            call.arm(settings.body_timeout_s, BodyTimeout(slow))
        call.plan = plan = await self._planner.plan(call, self._arrived)
        self._planner.count(plan)
        call.routing_s = time.perf_counter() - call.arrived_at_s
        self._metrics.routing_s.observe(call.routing_s)
        await self._dispatcher.run(call, plan)

    def _arrived(self, call: Call) -> None:
        """The body is in: from here on runs the deadline of the whole request."""
        call.arrived_at_s = time.perf_counter()
        limit_s = self._settings.request_timeout_s
        asked = header(call.headers, b"x-request-timeout")
        name = "request_timeout_s"
        if asked is not None:
            limit_s, name = min(limit_s, _seconds(asked)), "x-request-timeout"
        late = f"The request took longer than {limit_s:g} s ({name})."
        call.arm(limit_s, ReplicaTimeout(late))

    async def _end_badly(self, call: Call, error: RequestError) -> None:
        """An answer of our own, or the cut of one that has begun; who does not read misses it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if call.gone:
                    call.status = CLIENT_LEFT
                elif call.started:
                    await cut(call, error)
                else:
                    call.begin(error.status, is_events=False)
                    call.error_code = error.code
                    shape, request_id = call.route.shape, call.request_id.decode()
                    await send_error(call.send, error, own_headers(call), shape, request_id)

    def _account(self, call: Call) -> None:
        self._metrics.requests.add(1, call.route.path, str(call.status))
        self._receipts.ended(call)
        placement = call.placement
        if self._settings.access_log:
            access.tell(
                call.request_id,
                call.method,
                call.path,
                call.status,
                time.perf_counter() - call.started_at_s,
                replica=placement.replica.name if placement else None,
                rank=placement.rank if placement else None,
                matched_tokens=placement.matched_tokens if placement else None,
                uncached_tokens=placement.uncached_tokens if placement else None,
                scores=placement.choice.scores if placement else None,
            )


class RelayResponse(Response):
    """What a data route answers when it is reached through FastAPI: the relay takes over."""

    def __init__(self, relay: Relay, route: Route) -> None:
        super().__init__()
        self._relay = relay
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the connection over."""
        scope[RELAYED_KEY] = True
        await self._relay.serve(self._route, scope, receive, send)


def _seconds(value: bytes) -> float:
    """A positive number of seconds. Raises InvalidRequest."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        message = "x-request-timeout must be a positive number of seconds."
        raise InvalidRequest(message, param="x-request-timeout")
    return seconds
