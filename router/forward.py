"""Passes a replica's answer on to the client as it arrives, and learns from it on the way."""

from __future__ import annotations

import logging
import re
import time

from router.breaker import Outcome
from router.call import Call
from router.config import Settings
from router.errors import AnswerCut, RequestError, UpstreamCut
from router.load import Ticket
from router.metrics import Metrics
from router.owners import Owners, object_ids
from router.placement import Placement
from router.planning import Plan
from router.upstream import BODILESS, Exchange, Headers, ResponseHead
from router.wire import HOP_BY_HOP, forwarded, header

logger = logging.getLogger("kvroute.forward")

_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,9})\b')
# Something follows a whole number: what stands at a piece's end may go on in the next one.
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d{1,9})(?=\D)')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})\b')
_OWN = frozenset({b"x-kvroute-request-id", b"x-kvroute-replica", b"x-kvroute-matched-tokens"})
_SIZED = HOP_BY_HOP | _OWN
"""What is not passed on: a gateway behind this one says the same of itself."""
_UNSIZED = _SIZED | {b"content-length"}
"""Not passed on with a stream, whose error event no length has room for, or where no body is."""
USAGE_BYTES = 512
"""Of a usage object, its prompt's length stands at most so far before its cached tokens."""


class Forwarder:
    """Answers to clients."""

    def __init__(self, settings: Settings, metrics: Metrics, owners: Owners) -> None:
        self._settings = settings
        self._metrics = metrics
        self._owners = owners

    async def forward(
        self,
        call: Call,
        plan: Plan,
        head: ResponseHead,
        ticket: Ticket,
    ) -> None:
        """Pass the whole answer on. One that breaks off ends in an aborted transfer."""
        exchange, placement = call.exchange, call.placement
        assert exchange is not None and placement is not None
        replica, outcome = placement.replica, Outcome.of_status(head.status)
        is_events = _is_events(head)
        unsized = is_events or head.status in BODILESS
        headers = forwarded(head.headers, _UNSIZED if unsized else _SIZED) + own_headers(call)
        self._metrics.matched_tokens.add(placement.matched_tokens)
        call.begin(head.status, is_events=is_events)
        await call.send({"type": "http.response.start", "status": head.status, "headers": headers})
        try:
            chunk = await exchange.read(self._settings.idle_timeout_s)
            call.first_byte_at_s = time.perf_counter()
            if outcome is not Outcome.SERVER_ERROR:
                replica.began()
            streaming = plan.streaming and head.status == 200
            mark: bytes | None = call.route.token_mark if streaming else b""
            if mark is not None and mark in chunk:
                self._first_token(call, ticket, streaming)
                mark = None
            if call.route.makes and head.status == 200:
                await self._learn_owner(chunk, placement)
            while await self._pass_on(call, plan, placement, exchange, chunk):
                chunk = await exchange.read(self._settings.idle_timeout_s)
                if mark is not None and mark in chunk:
                    self._first_token(call, ticket, streaming)
                    mark = None
            if call.cached_tokens is None:
                self._compare(_seams(call), call, plan, placement)
            replica.report(outcome)
        except (UpstreamCut, TimeoutError) as error:
            call.check()
            replica.report(Outcome.CUT if isinstance(error, UpstreamCut) else Outcome.TIMEOUT)
            self._metrics.upstream_failures.add(1, replica.name, "cut")
            logger.warning("replica %s: cut: %s", replica.name, error)
            await cut(call, AnswerCut(str(error)))

    async def _pass_on(
        self, call: Call, plan: Plan, placement: Placement, exchange: Exchange, chunk: bytes
    ) -> bool:
        """Send one piece on; whether there will be more."""
        call.check()
        if b"cached_tokens" in chunk:
            self._compare(chunk, call, plan, placement)
        ended = exchange.ended
        if chunk:
            call.before_that, call.before, call.tail = call.before, call.tail, _ends(chunk)
        await call.send({"type": "http.response.body", "body": chunk, "more_body": not ended})
        return not ended

    def _first_token(self, call: Call, ticket: Ticket, streaming: bool) -> None:
        """The engine has prefilled this prompt."""
        ticket.first_token()
        if streaming and call.placement is not None:
            elapsed_s = time.perf_counter() - call.arrived_at_s
            self._metrics.ttft_s.observe(elapsed_s, call.placement.replica.name)
            call.first_token_s = time.monotonic() - ticket.placed_at_s
            call.placement.replica.began(call.first_token_s)

    async def _learn_owner(self, chunk: bytes, placement: Placement) -> None:
        for made in object_ids(chunk):
            await self._owners.put(made, placement.replica.name)

    def _compare(self, chunk: bytes, call: Call, plan: Plan, placement: Placement) -> None:
        """What the engine says it reused, against what was predicted."""
        found = _CACHED_TOKENS.findall(chunk)
        if not found:
            return
        call.cached_tokens = cached = int(found[-1])
        call.engine_prompt_tokens = _prompt_tokens(call.tail, chunk)
        if plan.prompt.token_ids is None:
            return
        self._metrics.cached_tokens.add(cached)
        over = placement.matched_tokens - cached
        if over:
            direction = "over" if over > 0 else "under"
            self._metrics.misprediction_tokens.add(abs(over), direction)


def _prompt_tokens(before: bytes, chunk: bytes) -> int | None:
    """The length that stands before the last cached tokens in a piece of an answer."""
    at = chunk.rfind(b'"cached_tokens"')
    near = chunk[max(at - USAGE_BYTES, 0) : at]
    lengths = _PROMPT_TOKENS.findall(near) or _PROMPT_TOKENS.findall(before[-USAGE_BYTES:] + near)
    return int(lengths[-1]) if lengths else None


def _ends(chunk: bytes) -> bytes:
    """A piece as it is kept while the next ones pass: without its middle, which has been read."""
    if len(chunk) <= 4 * USAGE_BYTES:
        return chunk
    return chunk[: 2 * USAGE_BYTES] + b"\0" + chunk[-2 * USAGE_BYTES :]


def _seams(call: Call) -> bytes:
    """The end of an answer, where a usage object may have come in two pieces.

    After it comes at most the end of the stream, in a third one.
    """
    return call.before_that[-USAGE_BYTES:] + call.before + call.tail[:USAGE_BYTES]


def _is_events(head: ResponseHead) -> bool:
    """Whether an event of ours can follow; in a compressed stream nobody could read it."""
    kind = header(head.headers, b"content-type")
    if kind is None or not kind.lower().startswith(b"text/event-stream"):
        return False
    return header(head.headers, b"content-encoding") in (None, b"", b"identity")


async def cut(call: Call, error: RequestError) -> None:
    """End an answer that has begun: an error event where it is a stream, and no proper end.

    The server aborts the transfer of an answer that is left unfinished.
    """
    call.error_code = error.code
    if not call.is_events:
        return
    number = int(found[-1]) + 1 if (found := _NUMBER.findall(call.tail)) else 0
    event = error.event(call.route.shape, call.request_id.decode(), number)
    if call.tail and not call.tail.endswith(b"\n\n"):
        event = b"\n\n" + event
    await call.send({"type": "http.response.body", "body": event, "more_body": True})


def own_headers(call: Call) -> Headers:
    """What the gateway says of a request it has served."""
    headers = [(b"x-kvroute-request-id", call.request_id)]
    if call.placement is not None:
        headers.append((b"x-kvroute-replica", call.placement.replica.name.encode()))
        headers.append((b"x-kvroute-matched-tokens", b"%d" % call.placement.matched_tokens))
    return headers
