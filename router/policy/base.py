"""What a policy sees and what it answers: plain values, so that a decision can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Named tuples, because a decision builds one of these for every rank of the fleet.


class Candidate(NamedTuple):
    """One rank that may serve the request, as known when the decision is made.

    `matched_tokens` are prompt tokens whose KV it holds; `queued_tokens` uncached prompt tokens
    placed there and not yet prefilled; `queue_s` the predicted seconds until these are done;
    `prefill_fixed_s` and `prefill_s_per_token` what a prefill there is known to cost, whatever its
    length and for each uncached token; `running` requests in flight.
    """

    replica: str
    rank: int
    matched_tokens: int
    queued_tokens: int
    queue_s: float
    prefill_fixed_s: float
    prefill_s_per_token: float
    running: int


class Snapshot(NamedTuple):
    """Everything a decision depends on. `turn` counts decisions; `draw` is uniform in [0, 1)."""

    prompt_tokens: int
    candidates: tuple[Candidate, ...]
    turn: int
    draw: float
    running_cost_s: float


class Choice(NamedTuple):
    """The chosen candidate's place in the snapshot, and every one's score: the least wins."""

    chosen: int
    scores: tuple[float, ...]


Policy = Callable[[Snapshot], Choice]


def least(scores: tuple[float, ...], turn: int) -> Choice:
    """The least score; ties go round, so that equal replicas share equally.

    `turn` moves the starting point: with all scores equal this is round robin.
    """
    count = len(scores)
    best = min(scores)
    at = turn % count
    while scores[at] != best:
        at = (at + 1) % count
    return Choice(at, scores)
