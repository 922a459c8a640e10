"""`round_robin`: each rank in turn."""

from __future__ import annotations

from router.policy.base import Choice, Snapshot, least


def round_robin(snapshot: Snapshot) -> Choice:
    """All scores are equal; the tie rule goes round."""
    return least((0.0,) * len(snapshot.candidates), snapshot.turn)
