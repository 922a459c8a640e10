"""`random`: a uniform draw, taken from the snapshot so that the decision can be replayed."""

from __future__ import annotations

from router.policy.base import Choice, Snapshot


def random(snapshot: Snapshot) -> Choice:
    """Candidate floor(draw * count)."""
    count = len(snapshot.candidates)
    return Choice(min(int(snapshot.draw * count), count - 1), (0.0,) * count)
