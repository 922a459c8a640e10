"""Drives a workload against a server in real time and keeps what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from loadgen.outcome import Outcome
from loadgen.stats import quantile
from loadgen.workload.model import Chat, Completion, Session, Workload

# Above this the client, not the server, shaped the run.
MAX_LAG_P99_S = 0.1


class Sender(Protocol):
    """What `loadgen.client.Client` is to a run."""

    async def send(self, request: Chat | Completion, outcome: Outcome) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Outcomes of all requests of a workload, those never sent included."""

    outcomes: tuple[Outcome, ...]
    duration_s: float

    @property
    def lag_p99_s(self) -> float:
        """How late the client sent, 99th percentile; not a property of the server."""
        return quantile([outcome.lag_s for outcome in self.outcomes], 0.99)

    @property
    def valid(self) -> bool:
        return self.lag_p99_s <= MAX_LAG_P99_S


async def run_workload(
    workload: Workload,
    sender: Sender,
    *,
    deadline_s: float,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = monotonic,
) -> Run:
    """Sends every turn when it is due. Returns at the latest after `deadline_s` seconds.

    A session whose turn failed ends there: its later turns need the reply. They, and what the
    deadline cuts off, are outcomes with error "not_sent" or "timeout".
    """
    start_s = clock()
    outcomes: list[list[Outcome]] = [[] for _ in workload.sessions]

    async def converse(index: int, session: Session) -> None:
        replies: list[str] = []
        due_s = start_s + session.start_s
        for number, turn in enumerate(session.turns):
            due_s += turn.think_s
            await sleep(max(0.0, due_s - clock()))
            outcome = Outcome(index, number, due_s)
            outcomes[index].append(outcome)
            await sender.send(session.request(replies), outcome)
            on_outcome(outcome)
            if outcome.error is not None:
                return
            replies.append(outcome.reply)
            due_s = clock()

    try:
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as sessions:
            for index, session in enumerate(workload.sessions):
                sessions.create_task(converse(index, session))
    except TimeoutError:
        pass
    for index, session in enumerate(workload.sessions):
        _complete(outcomes[index], index, session)
    return Run(tuple(outcome for one in outcomes for outcome in one), clock() - start_s)


def _complete(outcomes: list[Outcome], index: int, session: Session) -> None:
    """Accounts for what the deadline or an error left open."""
    if outcomes and outcomes[-1].done_s is None and outcomes[-1].error is None:
        outcomes[-1].error = "timeout"
    for number in range(len(outcomes), len(session.turns)):
        outcomes.append(Outcome(index, number, 0.0, error="not_sent"))
