"""From a request that is understood to the engine: choosing a rank, submitting, leaving early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from loadgen.replica.answering import Answer
from loadgen.replica.errors import EngineError, RequestRefused
from loadgen.replica.http import Exchange
from loadgen.replica.model import EngineRequest
from loadgen.replica.rank import RankRunner
from loadgen.replica.setup import Setup

_RANK_HEADER = "x-data-parallel-rank"
# How vLLM weighs waiting against running requests when it chooses a rank itself.
_WAITING_WEIGHT = 4


class Work(NamedTuple):
    """What the engine is told of a request besides its tokens."""

    adapter: str = ""
    salt: str = ""
    priority: int = 0
    session_id: str = ""


class Dispatcher:
    """Hands answers to the ranks of one replica and counts those in flight."""

    def __init__(self, ranks: Sequence[RankRunner], setup: Setup = Setup()) -> None:
        self.ranks = ranks
        self.setup = setup
        self.in_flight = 0
        self._numbers = count()

    def rank_for(self, headers: Mapping[str, str]) -> RankRunner:
        """The rank that the request names, else the least loaded. Raises RequestRefused.

        Before 0.14 nobody reads the header.
        """
        return self.rank(headers.get(_RANK_HEADER, "") if self.setup.since(0, 14) else "")

    def rank(self, wanted: str) -> RankRunner:
        """The rank of this number, else the least loaded. Raises RequestRefused."""
        wanted = wanted.strip()
        if not wanted.removeprefix("-").isdecimal():
            return min(self.ranks, key=lambda r: r.waiting * _WAITING_WEIGHT + r.running)
        number = int(wanted)
        if not 0 <= number < len(self.ranks):
            bounds = f"[0, {len(self.ranks)})"
            raise RequestRefused(f"data_parallel_rank {number} is out of range {bounds}")
        return self.ranks[number]

    def launch(self, exchange: Exchange, answer: Answer, work: Work) -> None:
        """Submit an answer whose client waits: should it leave, the engine stops.

        Raises RequestRefused or EngineError, and then nothing is submitted.
        """
        abort = self.submit(answer, work, self.rank_for(exchange.request.headers))
        exchange.on_abandoned = abort

    def submit(self, answer: Answer, work: Work, rank: RankRunner) -> Callable[[], None]:
        """Submit all samples of an answer; returns how to stop them. Raises EngineError."""
        ids: list[str] = []
        done = False

        def leave() -> None:
            nonlocal done
            if not done:
                done = True
                self.in_flight -= 1

        def abort() -> None:
            leave()
            for request_id in ids:
                rank.abort(request_id)

        self.in_flight += 1
        answer.on_done = leave
        try:
            for sink in answer.sinks():
                ids.append(str(next(self._numbers)))
                sample = sink.sample
                request = EngineRequest(
                    id=ids[-1],
                    prompt_ids=sample.prompt_ids,
                    max_tokens=len(sample.ids),
                    salt=work.salt,
                    adapter=work.adapter,
                    priority=work.priority,
                    reply_ids=sample.ids,
                    session_id=work.session_id,
                )
                rank.submit(request, sink)
        except EngineError:
            abort()
            raise
        return abort
