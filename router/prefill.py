"""What a prefill costs on one rank, learned from first tokens: a fixed part and a part per token.

Weighted least squares over a fading window. A sample weighs one over its predicted time squared, so
that short and long prompts count alike by their relative error. Two imagined samples of the prior
keep the line where too little has been seen: a rank's prior is what the whole fleet has learned,
the fleet's is the configured rate at first and then its own last estimate. There is no memory but
five sums.
"""

from __future__ import annotations

from typing import NamedTuple

FADING = 0.97
"""Weight left to a sample after one more: about the last thirty count."""
PRIOR_TOKENS = (128.0, 4096.0)
PRIOR_WEIGHT = 1.0
BOUND = 4.0
"""A sample counts for at most this many times what was predicted, and at least its inverse."""
YOUNG = 4
"""Samples that must have been within `BOUND` in a row before one that is not counts as an outlier.
Until then it is the estimate that is wrong, such as a configured rate that never was true.
"""
MAX_FIXED_SHARE = 0.8
"""Of a mean prefill. More is what noise says: then tokens would cost nothing, queues with them."""


class PrefillCost(NamedTuple):
    """Seconds of one prefill: `fixed_s`, and `s_per_token` for each uncached prompt token."""

    fixed_s: float
    s_per_token: float

    def seconds(self, tokens: float) -> float:
        """The predicted time of a prefill."""
        return self.fixed_s + tokens * self.s_per_token


class _Sums(NamedTuple):
    """Weighted sums of 1, x, y, x², xy over samples (x tokens, y seconds)."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def faded(self) -> _Sums:
        return _Sums(*(each * FADING for each in self))

    def with_sample(self, x: float, y: float, weight: float) -> _Sums:
        weighted = (weight, weight * x, weight * y, weight * x * x, weight * x * y)
        return _Sums(*(old + new for old, new in zip(self, weighted, strict=True)))


class PrefillModel:
    """Learns a `PrefillCost` from samples. A model as prior goes on learning meanwhile."""

    def __init__(self, prior: PrefillCost | PrefillModel) -> None:
        self._fleet = prior if isinstance(prior, PrefillModel) else None
        self._fitted = prior if isinstance(prior, PrefillCost) else None
        self._sums = _Sums()
        self._agreed = 0

    @property
    def cost(self) -> PrefillCost:
        """The present estimate; the prior's, before the first sample."""
        if self._fitted is not None:
            return self._fitted
        assert self._fleet is not None
        return self._fleet.cost

    def learn(self, tokens: int, seconds: float) -> None:
        """One prefill of `tokens` uncached tokens took `seconds` > 0."""
        present = self.cost
        # A rank leans on the fleet, the fleet on its own last estimate.
        prior = self._fleet.cost if self._fleet is not None else present
        off = seconds / present.seconds(tokens)
        if self._agreed < YOUNG and not 1 / BOUND <= off <= BOUND:
            present = prior = PrefillCost(present.fixed_s * off, present.s_per_token * off)
            self._sums, self._agreed = _Sums(), 0
        self._agreed += 1
        predicted = present.seconds(tokens)
        bounded = min(max(seconds, predicted / BOUND), predicted * BOUND)
        self._sums = self._sums.faded().with_sample(tokens, bounded, predicted**-2)
        sums = self._sums
        for at in PRIOR_TOKENS:
            expected = prior.seconds(at)
            # By the larger of both times, or a prior that is far too fast would weigh the most.
            weight = PRIOR_WEIGHT * max(expected, present.seconds(at)) ** -2
            sums = sums.with_sample(at, expected, weight)
        self._fitted = _line(sums)


def _line(sums: _Sums) -> PrefillCost:
    """The line of least squared error, with no negative part and no more than a share fixed."""
    slope = (sums.w * sums.xy - sums.x * sums.y) / (sums.w * sums.xx - sums.x * sums.x)
    fixed = (sums.y - slope * sums.x) / sums.w
    if fixed < 0:
        return PrefillCost(0.0, sums.xy / sums.xx)
    mean_s, mean_tokens = sums.y / sums.w, sums.x / sums.w
    if fixed > MAX_FIXED_SHARE * mean_s:
        return PrefillCost(MAX_FIXED_SHARE * mean_s, (1 - MAX_FIXED_SHARE) * mean_s / mean_tokens)
    return PrefillCost(fixed, slope)
