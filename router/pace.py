"""How fast a rank prefills, as samples: so many tokens in so many busy seconds.

An engine computes what waits in shared steps, so first tokens come in groups: a short prompt that
shares its step with a long one has the long one's first-token time. Taken alone it would say that
prompts cost the same whatever their length. So what ends together is one sample, with the tokens of
all of it.
"""

from __future__ import annotations

from collections.abc import Callable

SAME_STEP_SHARE = 0.1
"""First tokens this close, as a share of their service time, have ended in one step."""
SAME_STEP_S = 0.003
"""Or this close: one step's answers and events arrive on several connections."""


class Pace:
    """Gathers one rank's samples and hands each to `learn(tokens, seconds)` when it is whole."""

    __slots__ = (
        "_before_s",
        "_closes_at_s",
        "_end_s",
        "_learn",
        "_partial_tokens",
        "_start_s",
        "_tokens",
    )

    def __init__(self, learn: Callable[[int, float], None]) -> None:
        self._learn = learn
        self._tokens = 0
        self._partial_tokens = 0
        self._start_s = self._end_s = self._closes_at_s = 0.0
        self._before_s = 0.0

    @property
    def open(self) -> bool:
        """Whether a sample waits for others that may belong to it."""
        return self._tokens > 0

    def computed(self, tokens: int) -> None:
        """A part of a prompt is done whose end is still to come."""
        self._partial_tokens += tokens

    def ended(self, tokens: int, placed_at_s: float, now_s: float) -> None:
        """A prompt's prefill has ended, `tokens` of it since its last part; it came at
        `placed_at_s`.
        """
        self.settle(now_s)
        # What was done before the last sample's end is in that one.
        begun_s = max(placed_at_s, self._before_s)
        if not self._tokens:
            self._start_s = begun_s
            same_s = max(SAME_STEP_S, SAME_STEP_SHARE * (now_s - begun_s))
            self._closes_at_s = now_s + same_s
        self._start_s = min(self._start_s, begun_s)
        self._tokens += max(tokens, 0) + self._partial_tokens
        self._partial_tokens = 0
        self._end_s = now_s

    def settle(self, now_s: float) -> None:
        """Learn the open sample, once nothing can belong to it any more."""
        if self._tokens and now_s > self._closes_at_s:
            tokens, self._tokens = self._tokens, 0
            self._before_s = self._end_s
            if self._end_s > self._start_s:
                self._learn(tokens, self._end_s - self._start_s)

    def skip(self, now_s: float) -> None:
        """A prefill has ended that says nothing of its cost."""
        self.settle(now_s)
        if not self._tokens:
            self._before_s = now_s
