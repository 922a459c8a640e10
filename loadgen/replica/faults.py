"""Faults on demand: late heads, cut and stalled answers, refusals, a health check that hangs.

Of the simulated replica only, for tests of what stands in front of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import orjson

from loadgen.replica.answering import respond_json
from loadgen.replica.errors import ReplicaError, RequestRefused
from loadgen.replica.http import Exchange
from loadgen.replica.requests import read_json
from loadgen.replica.routing import Route

_HEALTH = ("/health", "/ping", "/health_generate")
# Requests that work on the replica itself, not on a model.
_CONTROL = ("/sleep", "/wake_up", "/reset_prefix_cache", "/flush_cache")

Count = Annotated[int, msgspec.Meta(ge=0)]
Handler = Callable[[Exchange], None]


class FaultPlan(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What goes wrong. A chunk is one write of a stream; an answer in one piece has two halves.

    The faults of requests strike POST requests to a model, the next `times` of them (None: all).
    """

    head_delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    cut_in_head: bool = False
    cut_after_chunks: Count | None = None
    stall_after_chunks: Count | None = None
    reset: bool = False
    """Cuts end with RST instead of FIN."""
    refuse_status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    retry_after_s: Count | None = None
    times: Count | None = None
    hang_health: bool = False
    health_status: Annotated[int, msgspec.Meta(ge=200, le=599)] = 200


def parse_plan(text: str) -> FaultPlan:
    """A plan from the command line. Raises ReplicaError."""
    try:
        return msgspec.json.decode(text.encode(), type=FaultPlan)
    except msgspec.DecodeError as error:
        raise ReplicaError(f"--faults: {error}") from error


class Faults:
    """Stands between the server and its handler; GET, POST and DELETE /sim/faults change it."""

    def __init__(self, plan: FaultPlan, handler: Handler) -> None:
        self._plan = plan
        self._left = plan.times
        self._handler = handler

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("GET", "/sim/faults", self._show),
            Route("POST", "/sim/faults", self._change),
            Route("DELETE", "/sim/faults", self._clear),
        ]

    def handle(self, exchange: Exchange) -> None:
        """The server's handler."""
        request = exchange.request
        if request.path in _HEALTH:
            self._health(exchange)
        elif self._strikes(request.method, request.path):
            self._spoil(exchange, self._plan)
        else:
            self._handler(exchange)

    def _strikes(self, method: str, path: str) -> bool:
        if method != "POST" or path.startswith("/sim/") or path in _CONTROL or self._left == 0:
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def _spoil(self, exchange: Exchange, plan: FaultPlan) -> None:
        def begin() -> None:
            if not exchange.open:
                return
            if plan.refuse_status is not None:
                _refuse(exchange, plan.refuse_status, plan.retry_after_s)
                return
            cuts = plan.cut_in_head or plan.cut_after_chunks is not None
            spoilt = cuts or plan.stall_after_chunks is not None
            self._handler(SpoiltExchange(exchange, plan) if spoilt else exchange)

        if not plan.head_delay_s:
            begin()
            return
        exchange.on_abandoned = (
            asyncio.get_running_loop().call_later(plan.head_delay_s, begin).cancel
        )

    def _health(self, exchange: Exchange) -> None:
        if self._plan.hang_health:
            return
        if self._plan.health_status != 200:
            exchange.respond(self._plan.health_status, b"")
            return
        self._handler(exchange)

    def _show(self, exchange: Exchange) -> None:
        left = {"times": self._left}
        respond_json(exchange, {**msgspec.to_builtins(self._plan), **left})

    def _change(self, exchange: Exchange) -> None:
        self._set(read_json(exchange.request, FaultPlan))
        self._show(exchange)

    def _clear(self, exchange: Exchange) -> None:
        self._set(FaultPlan())
        self._show(exchange)

    def _set(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._left = plan.times


class SpoiltExchange(Exchange):
    """An answer that does not arrive whole. The engine does not know: it works to the end."""

    def __init__(self, inner: Exchange, plan: FaultPlan) -> None:
        super().__init__(inner.request, inner.connection)
        inner.on_abandoned = self.abandoned
        self._plan = plan
        self._begun = False
        self._over = False
        self._chunks = 0

    def write(self, data: bytes) -> None:
        if self._begun:
            self._chunk(data)
            return
        self._begun = True
        head, blank, body = data.partition(b"\r\n\r\n")
        if self._plan.cut_in_head:
            super().write(head[: len(head) // 2])
            self._cut()
            return
        if self._plan.stall_after_chunks != 0:
            super().write(head + blank)
        self._check()
        half = len(body) // 2
        for piece in (body[:half], body[half:]) if body else ():
            self._chunk(piece)

    def _chunk(self, data: bytes) -> None:
        if not self._over:
            super().write(data)
            self._chunks += 1
            self._check()

    def _check(self) -> None:
        if self._chunks == self._plan.cut_after_chunks:
            self._cut()
        elif self._chunks == self._plan.stall_after_chunks:
            self._over = True

    def _cut(self) -> None:
        self._over = True
        self.cut(reset=self._plan.reset)

    def _finish(self, *, close: bool) -> None:
        self.on_abandoned = None
        if not self._over:
            super()._finish(close=close)


def _refuse(exchange: Exchange, status: int, retry_after_s: int | None) -> None:
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    refusal = RequestRefused("a fault that was asked for", status=status, kind="ServiceUnavailable")
    error = {"message": str(refusal), "type": refusal.kind, "param": None, "code": status}
    exchange.respond(status, orjson.dumps({"error": error}), headers=headers)
