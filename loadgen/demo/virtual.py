"""A fleet of simulated engines in virtual time: the demo's traffic without processes or waiting.

The engine core is the one that the simulated replicas run in real time. There is no network, no
gateway and no client here, so a rule that places as a measured policy did comes out a little faster
than the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

from loadgen.demo.plan import Plan, PlannedTurn
from loadgen.outcome import Outcome
from loadgen.replica.engine import Engine, EngineModel, EngineRequest, StepResult


class VirtualReplica:
    """One engine and the time until which its present step lasts."""

    def __init__(self, model: EngineModel) -> None:
        self.engine = Engine(model, record_events=False)
        self.busy_until_s = 0.0
        self.stepping = False

    def uncached_tokens(self, turn: PlannedTurn) -> int:
        """Prompt tokens that this replica would have to compute."""
        prompt_tokens = len(turn.prompt_ids)
        return prompt_tokens - self.engine.cached_prefix_tokens(turn.hashes, prompt_tokens)

    def first_token_s(self, turn: PlannedTurn, now_s: float) -> float:
        """Predicted seconds to this turn's first token, if it were placed here now.

        What is left of the present step, then everything queued and this prompt itself in steps of
        the token budget, each of which also decodes for the running batch.
        """
        model = self.engine.model
        own = self.uncached_tokens(turn)
        ahead = self.engine.queued_uncached_tokens()
        steps = -(-(ahead + own) // model.max_batched_tokens)
        return (
            (max(0.0, self.busy_until_s - now_s) if self.stepping else 0.0)
            + model.prefill_c_s * self.engine.waiting
            + model.prefill_a_s * ahead
            + self.own_prefill_s(turn)
            + steps * model.decode_s(self.engine.running)
        )

    def own_prefill_s(self, turn: PlannedTurn) -> float:
        """Seconds of computation that placing this turn here costs."""
        own = self.uncached_tokens(turn)
        return self.engine.model.prefill_s(own, len(turn.prompt_ids) - own, first=True)


Place = Callable[[int, PlannedTurn, Sequence[VirtualReplica], float], int]
"""(session, turn, replicas, now) -> index of the replica."""


def play(plan: Plan, model: EngineModel, replicas: int, place: Place) -> list[Outcome]:
    """Runs the plan to its end and returns one outcome per turn, ordered as in the plan."""
    return _Play(plan, model, replicas, place).run()


class _Play:
    def __init__(self, plan: Plan, model: EngineModel, replicas: int, place: Place) -> None:
        self._plan = plan
        self._place = place
        self._fleet = [VirtualReplica(model) for _ in range(replicas)]
        self._outcomes: dict[str, Outcome] = {}
        self._order = count()
        # (time, tie-break, what happens); a step's end carries its result.
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []

    def run(self) -> list[Outcome]:
        for index, session in enumerate(self._plan.sessions):
            self._arrive_at(session.start_s, index, 0)
        while self._agenda:
            now_s, _, happen = heappop(self._agenda)
            happen(now_s)
        return sorted(self._outcomes.values(), key=lambda one: (one.session, one.turn))

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heappush(self._agenda, (when_s, next(self._order), happen))

    def _arrive_at(self, when_s: float, session: int, number: int) -> None:
        self._at(when_s, lambda now_s: self._arrive(session, number, now_s))

    def _arrive(self, session: int, number: int, now_s: float) -> None:
        turn = self._plan.sessions[session].turns[number]
        index = self._place(session, turn, self._fleet, now_s)
        request_id = f"{session}.{number}"
        self._outcomes[request_id] = Outcome(
            session,
            number,
            now_s,
            sent_s=now_s,
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.reply_ids),
            replica=str(index),
        )
        replica = self._fleet[index]
        replica.engine.add(_request(request_id, turn, replica.engine.model), now_s)
        if not replica.stepping:
            # After whatever else arrives at this very moment, so that it joins the same step.
            replica.stepping = True
            self._at(now_s, lambda start_s: self._step(replica, start_s))

    def _step(self, replica: VirtualReplica, now_s: float) -> None:
        # Nothing can arrive before the next entry of the agenda, so quiet rounds until then may
        # be taken together.
        until_s = self._agenda[0][0] if self._agenda else None
        result = replica.engine.step(now_s, until_s)
        replica.stepping = result is not None
        if result is not None:
            replica.busy_until_s = result.end_s
            self._at(result.end_s, lambda end_s: self._step_done(replica, result, end_s))

    def _step_done(self, replica: VirtualReplica, result: StepResult, now_s: float) -> None:
        for request_id, first in result.first.items():
            outcome = self._outcomes[request_id]
            outcome.first_token_s = now_s
            outcome.cached_tokens = first.cached_tokens
        for request_id in result.finished:
            self._finish(self._outcomes[request_id], now_s)
        self._step(replica, now_s)

    def _finish(self, outcome: Outcome, now_s: float) -> None:
        outcome.done_s = now_s
        following = outcome.turn + 1
        turns = self._plan.sessions[outcome.session].turns
        if following < len(turns):
            self._arrive_at(now_s + turns[following].think_s, outcome.session, following)


def _request(request_id: str, turn: PlannedTurn, model: EngineModel) -> EngineRequest:
    full_blocks = len(turn.prompt_ids) // model.block_size_tokens
    return EngineRequest(
        request_id,
        turn.prompt_ids,
        len(turn.reply_ids),
        reply_ids=turn.reply_ids,
        hashes=turn.hashes[:full_blocks],
    )
