"""Numbers of a run, from its outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, nan

from loadgen.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of a comparison. Times in seconds, over whole answers only.

    `hotspot` is replicas times the largest share of one replica: 1 is even, `replicas` is all on
    one. `requests` counts every request of the workload, `errors` those without a whole answer.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    cached_fraction: float
    hotspot: float
    requests: int
    errors: int
    error_kinds: dict[str, int]
    itl_p50_s: float
    itl_p99_s: float
    prompt_tokens: int
    completion_tokens: int


def summarise(outcomes: Sequence[Outcome], replicas: int) -> Summary:
    """Raises ValueError for no outcomes. Times are NaN when no request succeeded."""
    if not outcomes:
        raise ValueError("a summary needs at least one outcome")
    whole = [outcome for outcome in outcomes if outcome.error is None]
    ttft_s = [outcome.ttft_s for outcome in whole if outcome.ttft_s is not None]
    gaps_s = [gap for outcome in whole for gap in outcome.gaps_s]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in whole)
    kinds = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return Summary(
        ttft_mean_s=sum(ttft_s) / len(ttft_s) if ttft_s else nan,
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        cached_fraction=_ratio(sum(outcome.cached_tokens for outcome in whole), prompt_tokens),
        hotspot=_hotspot((outcome.replica for outcome in whole), replicas),
        requests=len(outcomes),
        errors=len(outcomes) - len(whole),
        error_kinds=dict(kinds),
        itl_p50_s=quantile(gaps_s, 0.5),
        itl_p99_s=quantile(gaps_s, 0.99),
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(outcome.completion_tokens for outcome in whole),
    )


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the gateway had predicted to be reused against what the engines say, in prompt tokens.

    `over_tokens` were predicted and not reused, `under_tokens` reused and not predicted; `exact` is
    the share of requests with neither.
    """

    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    over_tokens: int
    under_tokens: int
    exact: float


def reuse(outcomes: Sequence[Outcome]) -> Reuse:
    """Over whole answers for which the gateway had a prediction."""
    told = [
        (one.matched_tokens, one.cached_tokens, one.prompt_tokens)
        for one in outcomes
        if one.error is None and one.matched_tokens is not None
    ]
    return Reuse(
        prompt_tokens=sum(prompt for _, _, prompt in told),
        predicted_tokens=sum(matched for matched, _, _ in told),
        cached_tokens=sum(cached for _, cached, _ in told),
        over_tokens=sum(max(0, matched - cached) for matched, cached, _ in told),
        under_tokens=sum(max(0, cached - matched) for matched, cached, _ in told),
        exact=_ratio(sum(matched == cached for matched, cached, _ in told), len(told)),
    )


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value with at least a share `q` of all values at or below it; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(q * len(ordered)) - 1)] if ordered else nan


def _hotspot(replicas_used: Iterable[str], replicas: int) -> float:
    shares = Counter(replicas_used)
    return _ratio(replicas * max(shares.values(), default=0), shares.total())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
