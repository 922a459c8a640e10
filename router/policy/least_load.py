"""`least_load`: the rank with the least work placed on it, whatever it has cached."""

from __future__ import annotations

from router.policy.base import Choice, Snapshot, least


def least_load(snapshot: Snapshot) -> Choice:
    """argmin of seconds of queued prefill plus the cost of the running batch."""
    scores = tuple(
        candidate.queue_s + candidate.running * snapshot.running_cost_s
        for candidate in snapshot.candidates
    )
    return least(scores, snapshot.turn)
