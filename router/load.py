"""Load: the work this gateway has placed on each rank and not seen finish.

One owner, no awaits. A request's share is taken up by `RankLoad.take()` and given back by the
ticket's exit on every way out, cancellation included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import TracebackType

from cache_index.flights import Flight
from router.pace import Pace
from router.prefill import PrefillCost, PrefillModel

PRIOR_FIXED_S = 0.005
"""Seconds of a prefill that do not depend on its length, before anything has been seen."""
MEAN_WEIGHT = 0.05
"""Of the newest request in the mean prefill: about the last twenty count."""


class Inflight:
    """Requests at one replica, over all its ranks; those placed since `renew` also apart."""

    __slots__ = ("_generation", "on_idle", "recent", "running")

    def __init__(self) -> None:
        self.running = 0
        self.recent = 0
        self.on_idle: Callable[[], None] | None = None
        self._generation = 0

    def renew(self) -> None:
        """Count `recent` from here: what already runs, and may run for long, is not in it."""
        self._generation += 1
        self.recent = 0

    def enter(self) -> int:
        """A request is sent; returns what `leave` wants."""
        self.running += 1
        self.recent += 1
        return self._generation

    def leave(self, generation: int) -> None:
        """It has ended. Calls `on_idle`, once, when it was the last."""
        self.running -= 1
        if generation == self._generation:
            self.recent -= 1
        if not self.running and self.on_idle is not None:
            called, self.on_idle = self.on_idle, None
            called()


class Ticket:
    """One request's share of a rank's load; a context manager."""

    __slots__ = (
        "_load",
        "computed_tokens",
        "counted_tokens",
        "flight",
        "generation",
        "placed_at_s",
        "remaining_tokens",
        "streaming",
        "uncached_tokens",
    )

    def __init__(self, load: RankLoad, uncached_tokens: int, streaming: bool) -> None:
        self._load = load
        self.generation = 0
        self.uncached_tokens = uncached_tokens
        self.computed_tokens = uncached_tokens
        self.counted_tokens = 0
        self.remaining_tokens = uncached_tokens
        self.streaming = streaming
        self.placed_at_s = 0.0
        self.flight: Flight | None = None

    def __enter__(self) -> Ticket:
        self._load._enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._load._leave(self)

    def first_token(self) -> None:
        """The engine has finished this prompt's prefill. Further calls do nothing."""
        self._load._prefilled(self)

    def computed(self, computed_tokens: int, remaining_tokens: int) -> None:
        """The engine's events: it computes so many tokens of this prompt, and so many remain.

        Further calls, once the prefill is over, do nothing.
        """
        self.computed_tokens = max(1, computed_tokens)
        self._load._computed(self, remaining_tokens)


class RankLoad:
    """Load of one (replica, rank), and its learned prefill cost.

    Prefill is modelled as one queue in order of placement, which is what a vLLM scheduler with
    chunked prefill does to first approximation: `done_at_s` is when it would run empty.
    The fixed part of a prefill is not queued for: an engine computes what waits in shared steps.
    `queued_tokens` are the uncached prompt tokens placed here that nothing has shown to be computed
    yet: neither the prompt's first token nor the blocks that its engine has stored.
    """

    def __init__(
        self,
        prior: PrefillModel,
        clock: Callable[[], float],
        inflight: Inflight | None = None,
    ) -> None:
        self._fleet_model = prior
        self._model = PrefillModel(prior)
        self._inflight = inflight or Inflight()
        self.running = 0
        self.queued_tokens = 0
        self._pending: dict[Ticket, None] = {}
        self._done_at_s = 0.0
        self._pace = Pace(self._learn)
        self._clock = clock

    @property
    def prefill(self) -> PrefillCost:
        """What a prefill is known to cost here."""
        if self._pace.open:
            self._pace.settle(self._clock())
        return self._model.cost

    def take(self, uncached_tokens: int, streaming: bool) -> Ticket:
        """A ticket to be entered when the request is sent."""
        return Ticket(self, uncached_tokens, streaming)

    def queue_s(self) -> float:
        """Predicted seconds until the prefill placed here is done."""
        return max(self._done_at_s - self._clock(), 0.0) if self._pending else 0.0

    def _enter(self, ticket: Ticket) -> None:
        now = self._clock()
        ticket.placed_at_s = now
        cost_s = ticket.uncached_tokens * self._model.cost.s_per_token
        self._done_at_s = (max(self._done_at_s, now) if self._pending else now) + cost_s
        self._pending[ticket] = None
        self.queued_tokens += ticket.uncached_tokens
        self.running += 1
        ticket.generation = self._inflight.enter()

    def _leave(self, ticket: Ticket) -> None:
        self.running -= 1
        if ticket in self._pending:
            self._forget(ticket)
            self._reschedule(self._clock())
        self._inflight.leave(ticket.generation)

    def _prefilled(self, ticket: Ticket) -> None:
        if ticket not in self._pending:
            return
        now = self._clock()
        if ticket.streaming:
            self._ended(ticket, now)
        else:
            self._pace.skip(now)
        self._forget_unstreamed_before(ticket)
        self._forget(ticket)
        self._reschedule(now)

    def _forget_unstreamed_before(self, ticket: Ticket) -> None:
        """Prefill is first come first served: what was placed before has been prefilled too.

        An answer that is not streamed shows its first token only by this, or by its end.
        """
        earlier = itertools.takewhile(lambda other: other is not ticket, self._pending)
        for other in [other for other in earlier if not other.streaming]:
            self._forget(other)

    def _computed(self, ticket: Ticket, remaining_tokens: int) -> None:
        if ticket not in self._pending:
            return
        now = self._clock()
        if remaining_tokens <= 0 and not ticket.streaming:
            self._ended(ticket, now)
            self._forget(ticket)
        else:
            # A streamed answer's first token tells the end best.
            remaining = max(1, remaining_tokens)
            self.queued_tokens -= ticket.remaining_tokens - remaining
            ticket.remaining_tokens = remaining
            done = ticket.computed_tokens - remaining
            if done > ticket.counted_tokens:
                self._pace.computed(done - ticket.counted_tokens)
                ticket.counted_tokens = done
        self._reschedule(now)

    def _forget(self, ticket: Ticket) -> None:
        del self._pending[ticket]
        self.queued_tokens -= ticket.remaining_tokens
        if ticket.flight is not None:
            ticket.flight.waiting = False

    def _reschedule(self, now: float) -> None:
        """The queue as it is now known: exactly the pending tokens remain."""
        self._done_at_s = now + self.queued_tokens * self._model.cost.s_per_token

    def _ended(self, ticket: Ticket, now: float) -> None:
        rest = ticket.computed_tokens - ticket.counted_tokens
        self._pace.ended(rest, ticket.placed_at_s, now)

    def _learn(self, tokens: int, seconds: float) -> None:
        # The rank leans on what the fleet knows, this sample included.
        self._fleet_model.learn(tokens, seconds)
        self._model.learn(tokens, seconds)


class FleetLoad:
    """The load of every rank, by (replica, rank)."""

    def __init__(self, prefill_tokens_per_s: float, clock: Callable[[], float]) -> None:
        self._model = PrefillModel(PrefillCost(PRIOR_FIXED_S, 1.0 / prefill_tokens_per_s))
        self._clock = clock
        self._ranks: dict[tuple[str, int], RankLoad] = {}
        self.mean_prefill_s = 0.0
        self._inflight: dict[str, Inflight] = {}
        self.turn = 0

    def rank(self, replica: str, rank: int) -> RankLoad:
        """The load of one rank, known or new."""
        key = (replica, rank)
        found = self._ranks.get(key)
        if found is None:
            inflight = self.inflight(replica)
            found = self._ranks[key] = RankLoad(self._model, self._clock, inflight)
        return found

    def inflight(self, replica: str) -> Inflight:
        """The requests at one replica, known or new."""
        return self._inflight.setdefault(replica, Inflight())

    def forget(self, replica: str) -> None:
        """A replica is gone. Requests that still run give their load back to what they took it
        from; one that comes back under the same name starts with none.
        """
        self._inflight.pop(replica, None)
        for key in [key for key in self._ranks if key[0] == replica]:
            del self._ranks[key]

    def placed(self, cost_s: float) -> None:
        """A request was placed: `mean_prefill_s` follows what prefills cost where they are sent."""
        weight = MEAN_WEIGHT if self.mean_prefill_s else 1.0
        self.mean_prefill_s += weight * (cost_s - self.mean_prefill_s)

    def next_turn(self) -> int:
        """A counter over decisions, for policies that go round; `turn` is the next one's."""
        turn = self.turn
        self.turn = turn + 1
        return turn

    def ranks(self) -> dict[tuple[str, int], RankLoad]:
        """All ranks seen so far, for metrics."""
        return dict(self._ranks)
