"""`cost`: the rank with the fewest predicted seconds to the first token."""

from __future__ import annotations

from router.policy.base import Candidate, Choice, Snapshot, least


def predicted_ttft_s(candidate: Candidate, prompt_tokens: int, running_cost_s: float) -> float:
    """Seconds to the first token: the queue, this prompt's uncached part, the running batch.

    At least one token is always computed, also when the whole prompt is cached.
    """
    uncached = max(prompt_tokens - candidate.matched_tokens, 1)
    return (
        candidate.queue_s
        + candidate.prefill_fixed_s
        + uncached * candidate.prefill_s_per_token
        + candidate.running * running_cost_s
    )


def cost(snapshot: Snapshot) -> Choice:
    """argmin of `predicted_ttft_s`."""
    scores = tuple(
        predicted_ttft_s(candidate, snapshot.prompt_tokens, snapshot.running_cost_s)
        for candidate in snapshot.candidates
    )
    return least(scores, snapshot.turn)
