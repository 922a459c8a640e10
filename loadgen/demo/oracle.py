"""The oracle: what a router that knows every cache, every queue and the hindsight could reach.

Each rule below decides with exact knowledge of all caches and queues, in virtual time. Greedy alone
is not a bound: it sends a conversation where its next token comes soonest and has no regard for the
turns that follow it there. So rules of greater foresight are played too, and the best of all plays
is then improved by hindsight: a conversation is moved to another replica from one of its turns on,
and the move is kept if the whole run's mean time to first token is lower. What comes out is the
best schedule found, with no network and no gateway in it: a bound that a real router can approach
and, short of luck, not pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from loadgen.demo.plan import Plan, PlannedTurn
from loadgen.demo.virtual import Place, VirtualReplica, play
from loadgen.outcome import Outcome
from loadgen.replica.engine import EngineModel

_IN_FLIGHT_PRICES_S = (0.0, 0.003, 0.01, 0.02, 0.05)
_SESSION_PRICES_S = (0.01, 0.03, 0.1)


def oracle(
    plan: Plan, model: EngineModel, replicas: int, *, seed: int, moves: int = 40
) -> list[Outcome]:
    """Outcomes of the best schedule found; the same arguments give the same schedule."""
    best = min((play(plan, model, replicas, rule) for rule in _rules()), key=mean_ttft_s)
    rng = Random(f"oracle:{seed}")
    for _ in range(moves if replicas > 1 else 0):
        moved = play(plan, model, replicas, Fixed(_move(best, plan, replicas, rng)))
        best = min(best, moved, key=mean_ttft_s)
    return best


def mean_ttft_s(outcomes: Sequence[Outcome]) -> float:
    """Seconds; every outcome of a play has a first token."""
    return sum(outcome.ttft_s or 0.0 for outcome in outcomes) / len(outcomes)


def _rules() -> Iterator[Place]:
    yield from (Greedy(price_s) for price_s in _IN_FLIGHT_PRICES_S)
    yield from (KeepSessions(price_s) for price_s in _SESSION_PRICES_S)


class Greedy:
    """Soonest first token; each request in flight on a replica counts `in_flight_price_s` more."""

    def __init__(self, in_flight_price_s: float) -> None:
        self._price_s = in_flight_price_s

    def __call__(
        self, session: int, turn: PlannedTurn, fleet: Sequence[VirtualReplica], now_s: float
    ) -> int:
        def score_s(index: int) -> float:
            replica = fleet[index]
            in_flight = replica.engine.running + replica.engine.waiting
            return replica.first_token_s(turn, now_s) + self._price_s * in_flight

        return min(range(len(fleet)), key=score_s)


class KeepSessions:
    """Places a session once, soonest first token plus a price per session there, and keeps it."""

    def __init__(self, session_price_s: float) -> None:
        self._price_s = session_price_s
        self._homes: dict[int, int] = {}

    def __call__(
        self, session: int, turn: PlannedTurn, fleet: Sequence[VirtualReplica], now_s: float
    ) -> int:
        if session not in self._homes:
            homes = list(self._homes.values())
            self._homes[session] = min(
                range(len(fleet)),
                key=lambda index: (
                    fleet[index].first_token_s(turn, now_s) + self._price_s * homes.count(index)
                ),
            )
        return self._homes[session]


class Fixed:
    """A schedule that was written down: replica by session, turn by turn."""

    def __init__(self, schedule: dict[int, list[int]]) -> None:
        self._rest = {session: iter(replicas) for session, replicas in schedule.items()}

    def __call__(
        self, session: int, turn: PlannedTurn, fleet: Sequence[VirtualReplica], now_s: float
    ) -> int:
        return next(self._rest[session])


def schedule_of(outcomes: Sequence[Outcome]) -> dict[int, list[int]]:
    """Replica by session and turn, of a play's outcomes."""
    schedule: dict[int, list[int]] = {}
    for outcome in outcomes:
        schedule.setdefault(outcome.session, []).append(int(outcome.replica))
    return schedule


def _move(
    outcomes: Sequence[Outcome], plan: Plan, replicas: int, rng: Random
) -> dict[int, list[int]]:
    """The schedule of `outcomes` with one session elsewhere from one of its turns on."""
    schedule = schedule_of(outcomes)
    # The turns that waited longest are where a move can gain most.
    slow = rng.choices(outcomes, weights=[outcome.ttft_s or 0.0 for outcome in outcomes])[0]
    turns = schedule[slow.session]
    elsewhere = (turns[slow.turn] + rng.randrange(1, replicas)) % replicas
    schedule[slow.session] = [*turns[: slow.turn], *[elsewhere] * (len(turns) - slow.turn)]
    return schedule
