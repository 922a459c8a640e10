"""How far one source can be trusted now, and why not further. Pure: no sockets, no clock.

A source is proven current as of a moment; the proof lasts for one lease. What is known of it may be
complete (from its first batch, or since it cleared its cache), or a part of what it holds.
"""

from __future__ import annotations

from collections import deque

from cache_index.types import Trust

__all__ = ["Standing"]

# Sequence numbers that fall back so often on one connection come from two publishers, not from an
# engine: that one would have to connect again.
_FALLS, _FALLS_WITHIN_S = 3, 30.0


class Standing:
    """Trust of one source.

    `complete`: True, False, or None while a life has begun and nothing of it is known yet.
    `conflict`, unless empty, says why nothing that comes can be told apart; it goes before all.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.complete: bool | None = None
        self.conflict = ""
        self.partial_reason = ""
        self.proof_at_s: float | None = None
        self.cut_off = ""
        self._falls: deque[float] = deque(maxlen=_FALLS)

    def trust(self, now_s: float, *, orphaned: bool) -> tuple[Trust, str]:
        """The level, and why it is not higher."""
        reason = self._no_trust(now_s)
        if reason:
            return Trust.NONE, reason
        if self.complete and not orphaned:
            return Trust.EXACT, ""
        if self.complete is None:
            return Trust.PARTIAL, "a new life, not replayed yet"
        return Trust.PARTIAL, self.partial_reason or "blocks with an unknown parent"

    def _no_trust(self, now_s: float) -> str:
        if self.conflict:
            return self.conflict
        if self._falling(now_s):
            return "its sequence numbers keep falling back: two publishers seem to share its topic"
        if self.proof_at_s is None:
            return "no contact yet"
        if self.cut_off:
            return self.cut_off
        return "not renewed within its lease" if now_s - self.proof_at_s > self._lease_s else ""

    def renew(self, at_s: float) -> None:
        """It was current at that moment."""
        self.proof_at_s = max(at_s, self.proof_at_s or at_s)
        self.cut_off = ""

    def lose(self, reason: str) -> None:
        """Some of what it holds is not known any more."""
        self.complete, self.partial_reason = False, reason

    def begin(self) -> None:
        """Another life, of which nothing is known."""
        self.complete, self.partial_reason = None, ""

    def whole(self) -> None:
        """All it holds is known."""
        self.complete, self.partial_reason = True, ""

    def fell(self, now_s: float) -> None:
        """A sequence number was lower than the last one, on the same connection."""
        self._falls.append(now_s)

    def connected(self) -> None:
        """A new connection: what fell back before was another's."""
        self._falls.clear()

    def _falling(self, now_s: float) -> bool:
        return len(self._falls) == _FALLS and now_s - self._falls[0] < _FALLS_WITHIN_S
