"""`prefix_only`: the rank with the longest cached prefix, whatever its load."""

from __future__ import annotations

from router.policy.base import Choice, Snapshot, least


def prefix_only(snapshot: Snapshot) -> Choice:
    """argmax of matched tokens; without any match, round robin."""
    scores = tuple(-float(candidate.matched_tokens) for candidate in snapshot.candidates)
    return least(scores, snapshot.turn)
