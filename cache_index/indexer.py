"""Sources into the index: one subscriber per source, one writer per source that leads.

Every gateway subscribes to every source, so each knows each source's state and can take over its
writing at once; a lease in Redis says who writes. Only a gateway that can see the source asks for
its lease, and one that has lost sight of it gives the lease up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import zmq

from cache_index.draining import Pump, RawSocket
from cache_index.errors import IndexUnavailable
from cache_index.flights import Flights
from cache_index.listening import Listening
from cache_index.redis_index import ApplyCall, RedisIndex
from cache_index.runner import SourceRunner
from cache_index.tasks import end
from cache_index.types import ListenerStatus, SourceKey, SourceSpec, SourceStatus, Trust
from cache_index.writer import SourceWriter

__all__ = ["Indexer"]

_log = logging.getLogger(__name__)
# What a dead writer has written is frozen until its lease ends, while others go on trusting the
# source. That must be over within a trust lease, with time left to write everything again.
_WRITER_SHARE_OF_TRUST_LEASE = 0.6
_MIN_WRITER_LEASE_S = 1.0
# A lease is renewed and asked for this often, so that one lost round does not cost it.
_LEASE_ROUNDS = 4
# A standby asks again as soon as the lease it was refused can have ended, but not in a tight loop.
_ASK_AGAIN_S = (0.05, 0.01)
_CALLS_PER_ROUND = 32
_RETRY_S = (0.05, 1.0)
_IDLE_WAKE_S = 1.0
_SWEEP_ROUND_S = 1.0
_SWEEP_NODES = 500
# One sweep round in a row, so that a big index does not wait forever and Redis is not held up.
_SWEEP_STEPS = 20


class Indexer:
    """All sources of this process."""

    def __init__(
        self,
        redis: RedisIndex,
        *,
        base_unit_tokens: int,
        trust_lease_s: float,
        writer_lease_s: float | None = None,
        listen: str | None = None,
        flights: Flights | None = None,
    ) -> None:
        self._redis = redis
        self._flights = flights or Flights()
        share_s = trust_lease_s * _WRITER_SHARE_OF_TRUST_LEASE
        lease_s = writer_lease_s or max(share_s, _MIN_WRITER_LEASE_S)
        self._lease_ttl_ms = round(lease_s * 1000)
        self._lease_round_s = lease_s / _LEASE_ROUNDS
        self._base_unit_tokens = base_unit_tokens
        self._trust_lease_s = trust_lease_s
        self._owner = uuid.uuid4().hex
        self._context: zmq.Context[RawSocket] = zmq.Context()
        self._pump = Pump()
        self._listening = Listening(self._context, self._pump, listen)
        self._wake = asyncio.Event()
        self._lease_wake = asyncio.Event()
        self._runners: dict[SourceKey, SourceRunner] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()

    @property
    def runners(self) -> dict[SourceKey, SourceRunner]:
        return self._runners

    def trust(self, key: SourceKey, now_s: float) -> Trust:
        runner = self._runners.get(key)
        return Trust.NONE if runner is None else runner.state.trust(now_s)[0]

    def set_sources(self, specs: Collection[SourceSpec]) -> None:
        """Follow exactly these sources."""
        wanted = {spec.key: spec for spec in specs}
        for key, runner in list(self._runners.items()):
            if wanted.get(key) != runner.spec:
                del self._runners[key]
                self._retire(runner, forget=key not in wanted)
        for key, spec in wanted.items():
            if key not in self._runners:
                self._runners[key] = SourceRunner(
                    spec,
                    context=self._context,
                    pump=self._pump,
                    wake=self._wake,
                    seen_wake=self._lease_wake,
                    base_unit_tokens=self._base_unit_tokens,
                    lease_s=self._trust_lease_s,
                    flights=self._flights,
                )
        self._listening.set_sources(self._runners.values())
        self._lease_wake.set()

    def statuses(self) -> list[SourceStatus]:
        """What is known about every declared source."""
        now_s = time.monotonic()
        return [
            runner.status(now_s, self._listening.reason(runner.spec))
            for _, runner in sorted(self._runners.items())
        ]

    def listeners(self) -> list[ListenerStatus]:
        """The sockets that publishers dial."""
        return self._listening.statuses()

    def void(self, replica: str, reason: str) -> None:
        """Forget what a replica's own cache holds: it has been emptied without a word."""
        for runner in self._runners.values():
            if runner.spec.replica == replica:
                runner.void(reason)

    def _retire(self, runner: SourceRunner, *, forget: bool) -> None:
        task = asyncio.create_task(self._end(runner, forget=forget))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self, runner: SourceRunner, *, forget: bool) -> None:
        await runner.close()
        token = runner.writer.token
        runner.writer.stop()
        # Without Redis the lease runs out by itself and the next writer voids what is left.
        with contextlib.suppress(IndexUnavailable):
            if token and forget:
                await self._redis.forget(runner.spec.key, self._owner, token)
            elif token:
                await self._redis.release(runner.spec.key, self._owner)

    def start(self) -> None:
        """Write, keep leases and clean up, until closed."""
        works = (self._write, self._keep_leases, self._sweep)
        self._tasks = [asyncio.create_task(self._for_ever(work)) for work in works]

    async def close(self) -> None:
        """Stop all sources and give up their leases; the entries stay for whoever takes over."""
        await end(*self._tasks)
        runners, self._runners = list(self._runners.values()), {}
        await asyncio.gather(*(self._end(runner, forget=False) for runner in runners))
        await asyncio.gather(*self._retiring)
        await self._listening.close()
        self._context.destroy(linger=0)

    async def _for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        pause_s = _RETRY_S[0]
        while True:
            try:
                await work()
                pause_s = _RETRY_S[0]
                continue
            except IndexUnavailable as reason:
                self.counts["unavailable"] += 1
                _log.debug("the index waits for Redis: %s", reason)
            except Exception:
                self.counts["internal_error"] += 1
                _log.exception("an index task starts over")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _RETRY_S[1])

    # -- writing

    async def _write(self) -> None:
        """Bring everything queued into Redis, then wait for more."""
        while batch := self._next_calls():
            outcomes = await self._redis.apply([call for _, call in batch])
            for (writer, _), outcome in zip(batch, outcomes, strict=True):
                self._settle(writer, outcome)
        await _woken(self._wake, _IDLE_WAKE_S)

    def _next_calls(self) -> list[tuple[SourceWriter, ApplyCall]]:
        batch: list[tuple[SourceWriter, ApplyCall]] = []
        for key in list(self._runners):
            # Those served last come first next time: one busy source must not starve others.
            runner = self._runners[key]
            call = runner.writer.next_call() if runner.writer.busy else None
            if call is not None:
                batch.append((runner.writer, call))
                self._runners[key] = self._runners.pop(key)
            if len(batch) == _CALLS_PER_ROUND:
                break
        return batch

    def _settle(self, writer: SourceWriter, outcome: tuple[str, bytes] | IndexUnavailable) -> None:
        if not isinstance(outcome, IndexUnavailable):
            self.counts[outcome[0]] += 1
            writer.settle(*outcome)
            if outcome[0] == "fenced":
                self._lease_wake.set()
            return
        self.counts["refused"] += 1
        writer.fail()
        raise outcome

    # -- leases

    async def _keep_leases(self) -> None:
        now_s = time.monotonic()
        pause_s = self._lease_round_s
        for runner in list(self._runners.values()):
            pause_s = min(pause_s, await self._keep_lease(runner, runner.look(now_s)))
        await _woken(self._lease_wake, max(pause_s, _ASK_AGAIN_S[0]))

    async def _keep_lease(self, runner: SourceRunner, seen: bool) -> float:
        """Renew, ask or give up. Returns the seconds until a lease that another has can end."""
        key, writer = runner.spec.key, runner.writer
        if writer.token and not seen:
            writer.stop()
            await self._redis.release(key, self._owner)
        elif writer.token:
            token = writer.token
            if not await self._redis.renew(key, self._owner, self._lease_ttl_ms, token):
                self.counts["lease_lost"] += 1
                writer.stop()
                self._lease_wake.set()
        elif seen:
            token, left_ms = await self._redis.acquire(
                key, self._owner, self._lease_ttl_ms, uuid.uuid4().hex
            )
            if token and self._runners.get(key) is runner:
                self.counts["lease_taken"] += 1
                writer.lead(token)
                self._wake.set()
            elif not token:
                return max(left_ms, 0) / 1000 + _ASK_AGAIN_S[1]
        return self._lease_round_s

    # -- cleaning

    async def _sweep(self) -> None:
        for _ in range(_SWEEP_STEPS):
            _, _, complete = await self._redis.sweep(_SWEEP_NODES)
            if complete:
                break
        await asyncio.sleep(_SWEEP_ROUND_S)


async def _woken(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or until it is time anyway; the event is taken."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()
