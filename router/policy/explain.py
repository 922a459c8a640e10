"""Why a policy chose as it did: every score in its parts, and one sentence. Pure; never on the way.

Nothing here decides anything. A decision is a snapshot and a choice, both plain values, so that
what they mean can be worked out long after, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from router.policy.base import Candidate, Choice, Snapshot

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "cost": "predicted seconds to the first token; the least wins",
        "least_load": "seconds of queued prefill and running requests; the least wins",
        "prefix_only": "matched tokens, negative; the least wins",
        "round_robin": "always 0; ranks take turns",
        "random": "always 0; a uniform draw",
    }
)


class Parts(NamedTuple):
    """Predicted seconds to the first token on one rank, by what they are spent on."""

    queue_s: float
    prefill_fixed_s: float
    prefill_tokens_s: float
    running_s: float

    @property
    def prefill_s(self) -> float:
        """This prompt's own prefill."""
        return self.prefill_fixed_s + self.prefill_tokens_s

    @property
    def total_s(self) -> float:
        """Their sum, added in the order of `predicted_ttft_s`: equal to it to the last bit."""
        return self.queue_s + self.prefill_fixed_s + self.prefill_tokens_s + self.running_s


def parts(candidate: Candidate, prompt_tokens: int, running_cost_s: float) -> Parts:
    """What `predicted_ttft_s` adds up."""
    uncached = max(prompt_tokens - candidate.matched_tokens, 1)
    return Parts(
        candidate.queue_s,
        candidate.prefill_fixed_s,
        uncached * candidate.prefill_s_per_token,
        candidate.running * running_cost_s,
    )


def why(policy: str, snapshot: Snapshot, choice: Choice) -> str:
    """One sentence on a decision: what the chosen rank was best at, and what the next lacked."""
    if len(snapshot.candidates) == 1:
        return f"{_name(snapshot.candidates[0])} is the only candidate"
    equal = choice.scores.count(choice.scores[choice.chosen])
    return _SENTENCES[policy](snapshot, choice, equal)


def _name(candidate: Candidate) -> str:
    return f"{candidate.replica}/{candidate.rank}"


def _next(choice: Choice) -> int:
    """The best of those not chosen."""
    others = (at for at in range(len(choice.scores)) if at != choice.chosen)
    return min(others, key=choice.scores.__getitem__)


def _seconds(least: float, other: float) -> tuple[str, str]:
    """Both as text, with as many digits as tell them apart."""
    digits = next((each for each in (3, 6) if round(least, each) != round(other, each)), 9)
    return f"{least:.{digits}f} s", f"{other:.{digits}f} s"


def _turn(snapshot: Snapshot, choice: Choice, equal: int) -> str:
    return f"the turn of {_name(snapshot.candidates[choice.chosen])} among {equal} equals"


def _cost(snapshot: Snapshot, choice: Choice, equal: int) -> str:
    best, other = snapshot.candidates[choice.chosen], snapshot.candidates[_next(choice)]
    least, following = _seconds(choice.scores[choice.chosen], choice.scores[_next(choice)])
    if equal > 1:
        score = choice.scores[choice.chosen]
        reason = f"predicted seconds are equal ({score:.3f} s): {_turn(snapshot, choice, equal)}"
    else:
        reason = (
            f"fewest predicted seconds: {least} on {_name(best)}, "
            f"next {_name(other)} with {following}: {_lacked(snapshot, best, other)}"
        )
    return reason + _passed_over(snapshot, choice)


def _lacked(snapshot: Snapshot, best: Candidate, other: Candidate) -> str:
    """The largest part of what `other` would have cost more."""
    mine = parts(best, snapshot.prompt_tokens, snapshot.running_cost_s)
    theirs = parts(other, snapshot.prompt_tokens, snapshot.running_cost_s)
    more = {
        "prefill": theirs.prefill_s - mine.prefill_s,
        "queue": theirs.queue_s - mine.queue_s,
        "running": theirs.running_s - mine.running_s,
    }
    largest = max(more, key=more.__getitem__)
    if largest == "queue":
        return f"{_name(other)} has {theirs.queue_s:.3f} s of prefill queued"
    if largest == "running":
        return f"{_name(other)} has {other.running} requests running, {_name(best)} {best.running}"
    if best.matched_tokens > other.matched_tokens:
        return f"{_name(best)} {_holds(best, snapshot)}"
    return f"a prefill costs less on {_name(best)}"


def _holds(candidate: Candidate, snapshot: Snapshot) -> str:
    return f"holds {candidate.matched_tokens:,} of {snapshot.prompt_tokens:,} tokens"


def _passed_over(snapshot: Snapshot, choice: Choice) -> str:
    """Why the longest prefix was left, where it was."""
    chosen = snapshot.candidates[choice.chosen]
    longest = max(snapshot.candidates, key=lambda each: each.matched_tokens)
    if longest.matched_tokens <= chosen.matched_tokens:
        return ""
    spent = parts(longest, snapshot.prompt_tokens, snapshot.running_cost_s)
    costs = {
        f"{spent.queue_s:.3f} s of prefill are queued there": spent.queue_s,
        f"{longest.running} requests run there": spent.running_s,
        "a prefill costs more there": spent.prefill_s,
    }
    but = max(costs, key=costs.__getitem__)
    return f"; {_name(longest)} {_holds(longest, snapshot)}, but {but}"


def _least_load(snapshot: Snapshot, choice: Choice, equal: int) -> str:
    best, other = snapshot.candidates[choice.chosen], snapshot.candidates[_next(choice)]
    least, following = _seconds(choice.scores[choice.chosen], choice.scores[_next(choice)])
    if equal > 1:
        score = choice.scores[choice.chosen]
        return f"the work placed is equal ({score:.3f} s): {_turn(snapshot, choice, equal)}"
    return f"least work placed: {least} on {_name(best)}, next {_name(other)} with {following}"


def _prefix_only(snapshot: Snapshot, choice: Choice, equal: int) -> str:
    best, other = snapshot.candidates[choice.chosen], snapshot.candidates[_next(choice)]
    if not best.matched_tokens:
        return f"nothing of the prompt is cached: {_turn(snapshot, choice, equal)}"
    if equal > 1:
        return (
            f"{equal} ranks hold {best.matched_tokens:,} tokens: {_turn(snapshot, choice, equal)}"
        )
    held = f"{_name(best)} {_holds(best, snapshot)}"
    return f"longest cached prefix: {held}, next {_name(other)} {other.matched_tokens:,}"


def _random(snapshot: Snapshot, choice: Choice, equal: int) -> str:
    return f"{_name(snapshot.candidates[choice.chosen])} is drawn at random among {equal}"


_SENTENCES: Mapping[str, Callable[[Snapshot, Choice, int], str]] = MappingProxyType(
    {
        "cost": _cost,
        "least_load": _least_load,
        "prefix_only": _prefix_only,
        "round_robin": _turn,
        "random": _random,
    }
)
