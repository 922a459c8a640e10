"""How many answered requests may be sent again: retries must not double a fleet's load."""

from __future__ import annotations

RESERVE = 10.0
"""Retries that a gateway with little traffic may make in a row."""


class RetryBudget:
    """A share of all requests, saved up to a reserve.

    Replicas that could not be reached cost the fleet nothing and are not counted here.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = RESERVE if share else 0.0

    def request(self) -> None:
        """A request has come in."""
        self._saved = min(self._saved + self._share, RESERVE)

    def retry(self) -> bool:
        """Whether one may be sent again now; if so it is paid for."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
