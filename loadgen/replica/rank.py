"""One rank in real time: runs the engine core by the clock and hands out what it produced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from loadgen.replica.engine import Engine
from loadgen.replica.events import KVEvent
from loadgen.replica.metrics import RankTimes
from loadgen.replica.model import EngineRequest, EngineStats, FirstToken, StepResult
from loadgen.replica.pool import PoolAnnouncer
from loadgen.replica.publisher import Publisher

# A step that ends late by less than this starts the next one as if it had ended in time, so
# that timer granularity does not slow the simulated engine down.
_CATCH_UP_S = 0.1


class Sink(Protocol):
    """Receives the tokens of one request."""

    def tokens(self, count: int, first: FirstToken | None, finished: bool) -> None:
        """`count` more tokens; `first` with the first of them, `finished` with the last."""

    def abort(self) -> None:
        """The engine gives the request up; nothing more comes."""

    def reason(self) -> str:
        """Why the request ends when all of its tokens have come: "stop" or "length"."""


class Encoder(Protocol):
    """Turns the events of one step into one payload."""

    def encode(self, events: Sequence[KVEvent], timestamp_s: float) -> bytes:
        """The payload frame; `timestamp_s` is Unix time."""


class _Flight:
    __slots__ = ("arrived_s", "last_s", "sink")

    def __init__(self, sink: Sink, now_s: float) -> None:
        self.sink = sink
        self.arrived_s = now_s
        self.last_s = now_s


class RankRunner:
    """Drives one engine. All methods must be called from the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        publisher: Publisher,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pool: PoolAnnouncer | None = None,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._publisher = publisher
        self._clock = clock
        self._wall = wall
        self._pool = pool
        self._flights: dict[str, _Flight] = {}
        self._step: StepResult | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.sleep_level: int | None = None
        self.times = RankTimes()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._engine.waiting

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks in use."""
        return self._engine.kv_usage

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats

    @property
    def publisher(self) -> Publisher:
        """Where this rank's KV events go."""
        return self._publisher

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Let a request wait; its tokens go to `sink`. Raises what `Engine.add` raises."""
        now_s = self._clock()
        self._engine.add(request, now_s)
        self._flights[request.id] = _Flight(sink, now_s)
        self._wake(now_s)

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more reaches its sink.

        It is not counted as finished: vLLM leaves its "abort" counter at 0, too.
        """
        if self._flights.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False while requests use it."""
        return self._engine.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Give up what is in flight and run no step until `wake`; from level 1 on the cache goes.

        As in vLLM, requests are still taken and wait, and that the cache is empty is told with
        the events of the next step.
        """
        self.sleep_level = level
        for request_id, flight in list(self._flights.items()):
            self.abort(request_id)
            self.times.finished["abort"] += 1
            flight.sink.abort()
        if level >= 1:
            self._engine.reset_prefix_cache()

    def wake(self) -> None:
        """Run steps again, first for what has waited."""
        self.sleep_level = None
        self._wake(self._clock())

    async def close(self) -> None:
        """Stop the clock and the publisher."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._publisher.close()

    def _wake(self, now_s: float) -> None:
        if self._step is None and not self._closed:
            self._begin(now_s)

    def _begin(self, start_s: float) -> None:
        if self.sleep_level is not None:
            self._timer = None
            return
        self._step = self._engine.step(start_s)
        if self._step is None:
            self._timer = None
            return
        delay_s = max(0.0, self._step.end_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end)

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        if step.events:
            events = self._pool.with_pool(step.events) if self._pool else step.events
            self._publisher.publish(self._encoder.encode(events, self._wall()))
        # Sinks may submit or abort; the next step begins after all of them have been told.
        self._step = step
        try:
            self._hand_out(step)
        finally:
            self._step = None
            if not self._closed:
                now_s = self._clock()
                self._begin(step.end_s if now_s - step.end_s < _CATCH_UP_S else now_s)

    def _hand_out(self, step: StepResult) -> None:
        finished = set(step.finished)
        for request_id, count in step.emitted.items():
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            first = step.first.get(request_id)
            self._measure(flight, step, first)
            done = request_id in finished
            if done:
                del self._flights[request_id]
                self.times.finished[flight.sink.reason()] += 1
                self.times.e2e.observe(step.end_s - flight.arrived_s)
            flight.sink.tokens(count, first, done)

    def _measure(self, flight: _Flight, step: StepResult, first: FirstToken | None) -> None:
        times = self.times
        if first is None:
            times.inter_token.observe(step.end_s - flight.last_s)
        else:
            times.ttft.observe(step.end_s - flight.arrived_s)
            times.queue.observe(max(0.0, first.admitted_s - first.arrived_s))
            times.prefill.observe(step.end_s - first.admitted_s)
        flight.last_s = step.end_s
