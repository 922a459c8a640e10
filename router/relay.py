"""The hot path: one generation request from the client's bytes to the replica's answer.

    body --> parse --> identify --> place --> open --> forward --> done
      |        |                     ^         |          |
      +- 4xx --+                     +- retry -+          +- cut: SSE error event, no [DONE],
                                   (nothing of an             aborted transfer
                                    answer had arrived)

The client's bytes go upstream unchanged. Whatever ends a request, its ticket gives its load back
and its connection is either reusable or closed; a client that leaves closes the upstream at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.call import Call
from router.config import Settings
from router.errors import (
    BodyTimeout,
    ClientGone,
    KvrouteError,
    ModelNotFound,
    NoReplica,
    Overloaded,
    ReplicaTimeout,
    RequestError,
    UpstreamCut,
    UpstreamUnavailable,
)
from router.identify import Identifier
from router.load import FleetLoad, Ticket
from router.metrics import Metrics
from router.placement import Placement, Placer, Prompt
from router.prompt import Request, parse_request
from router.replicas import Fleet, Replica
from router.upstream import Exchange, Headers, ResponseHead, request_head
from router.wire import (
    HOP_BY_HOP,
    Receive,
    Scope,
    Send,
    forwarded,
    read_body,
    send_error,
    upstream_headers,
)

logger = logging.getLogger("kvroute.relay")
access = logging.getLogger("kvroute.access")

RETRIED_STATUSES = frozenset({502, 503})
"""A replica that says it cannot serve now; another one may."""
MAX_CUT_ATTEMPTS = 2
"""A request that makes replicas drop it is not carried through the whole fleet."""
CLIENT_LEFT = 499
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')


class Relay:
    """The ASGI application behind the generation routes."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        load: FleetLoad,
        placer: Placer,
        identifier: Identifier,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._load = load
        self._placer = placer
        self._identifier = identifier
        self._metrics = metrics
        self._inflight = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._inflight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; never raises but for cancellation."""
        if self._loop is None:
            # Kept, because asking for the running loop is a system call in Python 3.11.
            self._loop = asyncio.get_running_loop()
        call = Call(scope, receive, send, self._loop)
        self._inflight += 1
        try:
            if self._inflight > self._settings.max_inflight:
                raise Overloaded("Too many requests at once (max_inflight); try again later.")
            await self._serve(call)
        except ClientGone:
            call.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if call.expired is None:
                raise  # the server is shutting down
            await self._end_badly(call, call.expired)
        except TimeoutError:
            message = "The replica was silent for too long (idle_timeout_s)."
            await self._end_badly(call, ReplicaTimeout(message))
        except RequestError as error:
            await self._end_badly(call, error)
        except KvrouteError as error:
            await self._end_badly(call, NoReplica(f"The replica's answer broke off: {error}."))
        except Exception:
            logger.exception("request %s failed", call.request_id.decode())
            await self._end_badly(call, RequestError("The gateway failed; the log says why."))
        finally:
            call.disarm()
            self._inflight -= 1
            self._account(call)

    async def _serve(self, call: Call) -> None:
        settings = self._settings
        slow = f"The request body did not arrive within {settings.body_timeout_s:g} s."
        call.arm(settings.body_timeout_s, BodyTimeout(slow))
        body = await read_body(call.headers, call.receive, max_bytes=settings.max_body_bytes)
        late = "The request took longer than request_timeout_s."
        call.arm(settings.request_timeout_s, ReplicaTimeout(late))
        arrived_s = time.perf_counter()
        request = parse_request(call.path, body)
        replicas = self._serving(request.model)
        call.watch()
        try:
            prompt = await self._identifier.identify(request, replicas, call.headers, len(body))
            matched = self._placer.match(prompt, replicas)
            self._metrics.routing_s.observe(time.perf_counter() - arrived_s)
            await self._attempt(call, request, prompt, matched, body, arrived_s)
        finally:
            call.unwatch()

    def _serving(self, model: str, tried: frozenset[str] = frozenset()) -> list[Replica]:
        """Replicas to choose from. Raises ModelNotFound, NoReplica."""
        found = self._fleet.serving(model)
        if tried:
            found = [replica for replica in found if replica.name not in tried]
        if found:
            return found
        if self._fleet.model_names() and not self._fleet.known(model):
            raise ModelNotFound(model, self._fleet.model_names())
        raise NoReplica("No replica can take this request now; GET /readyz says why. Try again.")

    async def _attempt(
        self,
        call: Call,
        request: Request,
        prompt: Prompt,
        matched: Mapping[tuple[str, int], int],
        body: bytes,
        arrived_s: float,
    ) -> None:
        """Place and send, elsewhere again while nothing of an answer has arrived."""
        tried: frozenset[str] = frozenset()
        cuts = 0
        while True:
            call.check()
            replicas = self._serving(request.model, tried)
            placement = self._placer.place(prompt, replicas, matched)
            call.placement = placement
            name = placement.replica.name
            rank_load = self._load.rank(name, placement.rank)
            with rank_load.take(placement.uncached_tokens, request.stream) as ticket:
                try:
                    head = await self._open(call, placement, body)
                except UpstreamUnavailable as error:
                    call.check()
                    cuts += call.exchange is not None
                    self._failed(placement.replica, "unavailable", str(error))
                    if cuts >= MAX_CUT_ATTEMPTS:
                        message = f"Replicas closed the connection without an answer: {error}."
                        raise NoReplica(message) from error
                else:
                    if head.status not in RETRIED_STATUSES or not self._others(replicas, name):
                        await self._forward(call, prompt, placement, head, ticket, arrived_s)
                        return
                    self._failed(placement.replica, "refused", f"status {head.status}")
                finally:
                    if call.exchange is not None:
                        call.exchange.release()
                        call.exchange = None
            tried |= {name}
            self._metrics.retries.inc()

    @staticmethod
    def _others(replicas: Sequence[Replica], name: str) -> bool:
        return any(replica.name != name for replica in replicas)

    async def _open(self, call: Call, placement: Placement, body: bytes) -> ResponseHead:
        """Send the request and wait for the response head. Raises UpstreamUnavailable."""
        replica = placement.replica
        rank = placement.rank if replica.ranked else None
        headers = upstream_headers(call.headers, replica.netloc, call.request_id, rank)
        head = request_head(b"POST", replica.base_path + call.target, headers, len(body))
        try:
            call.exchange = await replica.pool.acquire()
        except UpstreamUnavailable as error:
            replica.failed(str(error))
            raise
        try:
            return await self._send(call, call.exchange, head, body)
        except UpstreamUnavailable:
            # An idle connection may be closed by the replica just as it is used again.
            if not (call.exchange.reused and call.exchange.untouched) or call.gone:
                raise
        call.exchange.abort()
        call.exchange = await replica.pool.acquire(fresh=True)
        return await self._send(call, call.exchange, head, body)

    async def _send(self, call: Call, exchange: Exchange, head: bytes, body: bytes) -> ResponseHead:
        call.check()
        await exchange.send(head, body, b"POST")
        return await exchange.head(self._settings.idle_timeout_s)

    async def _forward(
        self,
        call: Call,
        prompt: Prompt,
        placement: Placement,
        head: ResponseHead,
        ticket: Ticket,
        arrived_s: float,
    ) -> None:
        """Pass the answer on as it arrives."""
        exchange = call.exchange
        assert exchange is not None
        headers = forwarded(head.headers, HOP_BY_HOP) + self._own_headers(call)
        call.status = head.status
        call.started = True
        self._metrics.matched_tokens.inc(placement.matched_tokens)
        await call.send({"type": "http.response.start", "status": head.status, "headers": headers})
        streaming = ticket.streaming and head.status == 200
        tail = b""
        try:
            chunk = await exchange.read(self._settings.idle_timeout_s)
            ticket.first_token()
            if streaming:
                elapsed_s = time.perf_counter() - arrived_s
                self._metrics.ttft_s.labels(placement.replica.name).observe(elapsed_s)
            while True:
                call.check()
                if b"cached_tokens" in chunk:
                    self._compare(chunk, prompt, placement)
                ended = exchange.ended
                await call.send(
                    {"type": "http.response.body", "body": chunk, "more_body": not ended}
                )
                if ended:
                    return
                tail = chunk
                chunk = await exchange.read(self._settings.idle_timeout_s)
        except (UpstreamCut, TimeoutError) as error:
            call.check()
            self._failed(placement.replica, "cut", str(error))
            if streaming:
                await self._send_cut_event(call, tail, error)

    async def _send_cut_event(self, call: Call, tail: bytes, error: Exception) -> None:
        """Tell a streaming client that its answer is not whole."""
        event = NoReplica(f"The replica's answer broke off: {error}. Send the request again.")
        data = b"data: %b\n\n" % event.body()
        if tail and not tail.endswith(b"\n\n"):
            data = b"\n\n" + data
        await call.send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end_badly(self, call: Call, error: RequestError) -> None:
        """An answer of our own; once the replica's has begun, only its abort is left."""
        if call.started or call.gone:
            call.status = call.status or error.status
            return
        call.status = error.status
        call.started = True
        await send_error(call.send, error, self._own_headers(call))

    @staticmethod
    def _own_headers(call: Call) -> Headers:
        headers = [(b"x-kvroute-request-id", call.request_id)]
        if call.placement is not None:
            headers.append((b"x-kvroute-replica", call.placement.replica.name.encode()))
            matched = b"%d" % call.placement.matched_tokens
            headers.append((b"x-kvroute-matched-tokens", matched))
        return headers

    def _failed(self, replica: Replica, kind: str, reason: str) -> None:
        self._metrics.upstream_failures.labels(replica.name, kind).inc()
        logger.warning("replica %s: %s: %s", replica.name, kind, reason)

    def _compare(self, chunk: bytes, prompt: Prompt, placement: Placement) -> None:
        """What the engine says it reused, against what was predicted."""
        found = _CACHED_TOKENS.findall(chunk)
        if not found or prompt.token_ids is None:
            return
        cached = int(found[-1])
        self._metrics.cached_tokens.inc(cached)
        over = placement.matched_tokens - cached
        if over:
            direction = "over" if over > 0 else "under"
            self._metrics.misprediction_tokens.labels(direction).inc(abs(over))

    def _account(self, call: Call) -> None:
        self._metrics.requests.labels(call.path, str(call.status)).inc()
        placement = call.placement
        if self._settings.access_log:
            line: dict[str, Any] = {
                "request_id": call.request_id.decode(),
                "path": call.path,
                "status": call.status,
                "seconds": round(time.perf_counter() - call.started_at_s, 6),
                "replica": placement.replica.name if placement else None,
                "rank": placement.rank if placement else None,
                "matched_tokens": placement.matched_tokens if placement else None,
                "uncached_tokens": placement.uncached_tokens if placement else None,
                "scores": placement.scores if placement else None,
            }
            access.info(orjson.dumps(line).decode())
