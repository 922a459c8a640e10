"""The time of day as a replica has it, which may be wrong."""

from __future__ import annotations

import time
from email.utils import formatdate


class Clock:
    """`skew_s` is how far the clock is ahead."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self._skew_s = skew_s
        self._second = 0
        self._date = ""

    def now_s(self) -> float:
        """Unix time."""
        return time.time() + self._skew_s

    def date(self) -> str:
        """The `date` header of an answer."""
        second = int(self.now_s())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True)
        return self._date
