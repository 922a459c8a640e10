"""Sends a planned request: placed, opened, and elsewhere again while nothing of an answer is there.

What is sent again, and where the limits are:

| what happened | sent again | limit |
|---|---|---|
| connecting failed | elsewhere | every replica once |
| an idle connection was closed just as it was used | to the same replica, afresh | once each |
| the replica closed before its answer | elsewhere, if repeatable | three replicas; see drops.py |
| it was silent, and then failed its probes too | elsewhere, if repeatable | the same |
| it answered one of `retry_statuses` | elsewhere, if repeatable | the retry budget |
| it was silent | no | its deadline |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from router.breaker import Outcome, State
from router.budget import RetryBudget
from router.call import Attempt, Call
from router.config import Settings
from router.drops import Drops
from router.errors import NoReplica, UpstreamUnavailable
from router.forward import Forwarder
from router.load import FleetLoad
from router.meter import PrefillMeter
from router.metrics import Metrics
from router.placement import Placement, Placer
from router.planning import Plan, Planner
from router.replicas import Replica
from router.upload import rest_of
from router.upstream import Exchange, ResponseHead, request_head
from router.wire import header, upstream_headers

logger = logging.getLogger("kvroute.dispatch")

LOOK_UP_S = 0.5
"""While an answer has not begun, the replica's health is looked at this often."""


class Dispatcher:
    """Carries out plans."""

    def __init__(
        self,
        settings: Settings,
        planner: Planner,
        placer: Placer,
        load: FleetLoad,
        forwarder: Forwarder,
        metrics: Metrics,
        meter: PrefillMeter,
    ) -> None:
        self._meter = meter
        self._settings = settings
        self._planner = planner
        self._placer = placer
        self._load = load
        self._forwarder = forwarder
        self._metrics = metrics
        self._budget = RetryBudget(settings.retry_budget)
        self._drops = Drops(self._budget)
        self._retried = frozenset(settings.retry_statuses)

    async def run(self, call: Call, plan: Plan) -> None:
        """Send until an answer is forwarded. Raises RequestError, TimeoutError, ClientGone."""
        self._budget.request()
        tried: frozenset[str] = frozenset()
        cuts, last = 0, ""
        while True:
            call.check()
            replicas = self._candidates(plan, tried, last)
            choices = replicas if tried else first_choices(plan, replicas)
            if cuts:
                choices = self._drops.apart(replicas)
            placement = self._placer.place(plan.prompt, choices, plan.matched, plan.rank)
            call.on_trial = not tried and choices is not replicas
            call.placement = placement
            replica = placement.replica
            if cuts:
                self._drops.sent(call, replica, cuts)
            rank_load = self._load.rank(replica.name, placement.rank)
            with rank_load.take(placement.uncached_tokens, plan.streaming) as ticket:
                try:
                    self._meter.begin(plan, placement, ticket)
                    head = await self._open(call, plan, placement)
                    if not self._try_elsewhere(plan, head, replicas):
                        await self._forwarder.forward(call, plan, head, ticket)
                        return
                    replica.report(Outcome.of_status(head.status))
                    last = self._failed(call, placement, "refused", f"status {head.status}")
                except UpstreamUnavailable as error:
                    call.check()
                    last = self._failed(call, placement, "unavailable", str(error))
                    if call.exchange is not None:
                        cuts += 1
                        replica.report(Outcome.CUT)
                        if not await self._drops.again(plan, replica, cuts):
                            raise self._drops.error(call, cuts, last) from error
                finally:
                    self._meter.end(ticket)
                    if cuts:
                        self._drops.ended(call)
                    if call.exchange is not None:
                        call.exchange.release()
                        call.exchange = None
            tried |= {replica.name}
            self._metrics.retries.add()

    def _candidates(self, plan: Plan, tried: frozenset[str], last: str) -> Sequence[Replica]:
        """Replicas to choose from; with none left, what the last one did is the answer."""
        try:
            return self._planner.candidates(plan.model, plan.only, tried)
        except NoReplica as error:
            if not last:
                raise
            message = f"{last}; no other replica can take this request. Try again."
            raise NoReplica(message, retry_after_s=error.retry_after_s or 1) from error

    def _try_elsewhere(self, plan: Plan, head: ResponseHead, replicas: Sequence[Replica]) -> bool:
        if head.status not in self._retried or not plan.repeatable or plan.only is not None:
            return False
        return len(replicas) > 1 and self._budget.retry()

    async def _open(self, call: Call, plan: Plan, placement: Placement) -> ResponseHead:
        """Send the request and wait for the response head. Raises UpstreamUnavailable."""
        replica = placement.replica
        # What must not be sent twice does not go on a connection that may just be closing.
        call.exchange = await self._connect(replica, fresh=not plan.repeatable)
        try:
            return await self._send(call, call.exchange, plan, placement)
        except UpstreamUnavailable:
            # An idle connection may be closed by the replica just as it is used again.
            if not (call.exchange.reused and call.exchange.untouched) or call.gone:
                raise
        call.exchange.abort()
        call.exchange = None
        call.exchange = await self._connect(replica, fresh=True)
        return await self._send(call, call.exchange, plan, placement)

    @staticmethod
    async def _connect(replica: Replica, *, fresh: bool) -> Exchange:
        try:
            return await replica.pool.acquire(fresh=fresh)
        except UpstreamUnavailable as error:
            replica.failed(str(error))
            replica.report(Outcome.REFUSED)
            raise

    async def _send(
        self, call: Call, exchange: Exchange, plan: Plan, placement: Placement
    ) -> ResponseHead:
        call.check()
        replica = placement.replica
        rank = placement.rank if replica.ranked else None
        trace = self._settings.make_traceparent
        headers = upstream_headers(call.headers, replica.netloc, call.request_id, rank, trace=trace)
        method = call.method.encode()
        length = _body_bytes(call, plan)
        head = request_head(method, replica.base_path + call.target, headers, length)
        upload = plan.upload
        if upload is None or upload.complete:
            await exchange.send(head, plan.body, method)
        else:
            first = plan.body if length is not None else _chunk(plan.body)
            await exchange.send(head, first, method)
            await self._send_on(call, exchange, plan, replica, chunked=length is None)
            call.watch()
        return await self._await_head(exchange, plan, replica)

    async def _send_on(
        self, call: Call, exchange: Exchange, plan: Plan, replica: Replica, *, chunked: bool
    ) -> None:
        """The rest of a form, as it arrives; a replica that is found down is not waited for.

        Raises BodyTimeout, BodyTooLarge, TimeoutError, UpstreamUnavailable.
        """
        limits = self._settings
        size, sent = limits.max_body_bytes, len(plan.body)
        rest = rest_of(call.receive, sent, size, limits.body_timeout_s)
        heard = replica.pool.heard

        def look() -> None:
            nonlocal heard
            if not replica.ready:
                raise UpstreamUnavailable(f"it reads nothing and is down: {replica.reason}")
            if replica.pool.heard == heard:
                replica.doubt()
            heard = replica.pool.heard

        idle_s = limits.idle_timeout_s
        try:
            await exchange.send_on(
                rest, chunked=chunked, idle_s=idle_s, look=look, look_s=LOOK_UP_S
            )
        except TimeoutError:
            replica.report(Outcome.TIMEOUT)
            raise

    async def _await_head(self, exchange: Exchange, plan: Plan, replica: Replica) -> ResponseHead:
        """The response head; a replica that stops answering its probes is not waited for.

        One that has said nothing to anybody for a whole look is asked at once whether it lives.
        """
        left_s = self._settings.first_byte_timeout_s
        while True:
            heard = replica.pool.heard
            slice_s = min(left_s, LOOK_UP_S)
            try:
                return await exchange.head(slice_s)
            except TimeoutError:
                left_s -= slice_s
                if left_s <= 0:
                    replica.report(Outcome.TIMEOUT)
                    raise
            if replica.ready:
                if replica.pool.heard == heard:
                    replica.doubt()
            elif plan.repeatable and self._elsewhere(plan, replica):
                raise UpstreamUnavailable(f"it was silent and is down: {replica.reason}")

    def _elsewhere(self, plan: Plan, replica: Replica) -> bool:
        return plan.only is None and self._planner.others(plan.model, replica.name)

    def _failed(self, call: Call, placement: Placement, kind: str, reason: str) -> str:
        """Count, log and note it; the same as a sentence."""
        replica = placement.replica
        call.attempts += (
            Attempt(placement.snapshot, placement.choice, call.on_trial, kind, reason),
        )
        self._metrics.upstream_failures.add(1, replica.name, kind)
        logger.warning("replica %s: %s: %s", replica.name, kind, reason)
        return f"Replica {replica.name!r} failed: {reason}"


def first_choices(plan: Plan, replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Of the replicas that may serve a request, those it is first placed among."""
    return (_on_trial(replicas) or replicas) if plan.repeatable else replicas


def _on_trial(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """A replica that waits for its trial request: others may look better for ever."""
    for replica in replicas:
        if replica.breaker.state is State.HALF_OPEN and replica.admits:
            return (replica,)
    return ()


def _body_bytes(call: Call, plan: Plan) -> int | None:
    """The body's length where it is known before its end."""
    if plan.upload is None or plan.upload.complete:
        return len(plan.body)
    declared = header(call.headers, b"content-length")
    return int(declared) if declared is not None else None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
