"""One declared source: its state, what feeds it, its writer, and what there is to say of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import zmq

from cache_index.dialed import DialedSource
from cache_index.draining import Pump, RawSocket
from cache_index.flights import Flights
from cache_index.ledger import Operation
from cache_index.source import SourceState
from cache_index.subscriber import Subscriber
from cache_index.tasks import end
from cache_index.types import SourceSpec, SourceStatus, Trust
from cache_index.writer import SourceWriter

__all__ = ["SourceRunner"]


class SourceRunner:
    """Runs from when it is made until closed.

    `wake` is set when there is something to write, `seen_wake` when the source comes into sight.
    """

    def __init__(
        self,
        spec: SourceSpec,
        *,
        context: zmq.Context[RawSocket],
        pump: Pump,
        wake: asyncio.Event,
        seen_wake: asyncio.Event,
        base_unit_tokens: int,
        lease_s: float,
        flights: Flights,
    ) -> None:
        self.spec = spec
        self._flights = flights
        self.state = SourceState(
            spec.model,
            base_unit_tokens=base_unit_tokens,
            lease_s=lease_s,
            replayable=spec.replay_endpoint is not None,
        )
        flights.follow(spec.key)
        self.state.ledger.prompts = partial(flights.of, spec.key)
        self.writer = SourceWriter(spec.key, self.state.ledger)
        self._wake = wake
        self._seen_wake = seen_wake
        self.seen = False
        self.dialed: DialedSource | None = None
        self.feed: DialedSource | Subscriber
        if spec.dials:
            self.feed = self.dialed = DialedSource(
                spec, self.state, context, self._take, lease_s=lease_s
            )
        else:
            self.feed = Subscriber(spec, self.state, context, pump, self._take, lease_s=lease_s)
        self.intake = self.feed.intake
        self._task = asyncio.create_task(self.feed.run())

    def look(self, now_s: float) -> bool:
        """Whether the source is in sight, so that this process may write it."""
        self.seen = self.state.trust(now_s)[0] is not Trust.NONE
        return self.seen

    def void(self, reason: str) -> None:
        """Forget what it holds; see SourceState.void."""
        self.intake.void(reason)

    def _take(self, operations: Sequence[Operation]) -> None:
        # The lease is asked for when a source comes into sight, not at the next round.
        if not self.seen and self.look(time.monotonic()):
            self._seen_wake.set()
        if operations:
            self.writer.add(operations)
            self._wake.set()
            flights = self._flights.of(self.spec.key)
            if flights is not None:
                flights.take(operations, self.state.ledger.unit)

    async def close(self) -> None:
        """Ends everything that feeds it."""
        self._flights.forget(self.spec.key)
        await end(self._task)

    def status(self, now_s: float, listening: str = "") -> SourceStatus:
        """`listening`: why the socket that its publisher dials is not bound, if it is not."""
        state, spec, intake = self.state, self.spec, self.intake
        trust, reason = state.trust(now_s)
        last_at_s = state.last_batch_at_s
        hint = "" if state.connected_now else spec.hint
        why = (reason, self.feed.error, listening, hint)
        return SourceStatus(
            replica=spec.replica,
            rank=spec.rank,
            trust=trust,
            reason="; ".join(filter(None, why)),
            epoch=state.life,
            last_seq=state.last_seq,
            batches=state.batches,
            unit_tokens=state.ledger.block_tokens,
            last_batch_age_s=None if last_at_s is None else now_s - last_at_s,
            leading=self.writer.token > 0,
            endpoint=spec.endpoint,
            replay_endpoint=spec.replay_endpoint,
            topic=spec.topic,
            dials=spec.dials,
            connected=state.connected_now,
            blocks=len(state.ledger),
            lag_s=intake.lag_s,
            counts={**state.counts, **intake.counts, **state.ledger.counts},
            malformed=dict(intake.failures),
        )
