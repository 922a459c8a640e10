"""Whether a replica may get a request, by what became of earlier ones. A pure state machine.

    closed --- N failures in a row, or one refused connection ---> open
    open ----- a successful probe, or a short wait while probes succeed ---> half-open
    half-open - its one trial is answered ---> slow start; the trial fails ---> open, for longer
    slow start - `slow_start_s` without trouble ---> closed

The clock is injected, nothing here waits. What time alone changes happens in `advance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

FULL_ALLOWANCE = 64
"""Slow start ends here: a replica that serves this many at once is not slow any more."""
NOT_IMPLEMENTED = 501


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    SLOW_START = "slow_start"


class Outcome(StrEnum):
    """What became of one attempt at a replica."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    REFUSED = "refused"
    CUT = "cut"
    TIMEOUT = "timeout"
    ABANDONED = "abandoned"

    @classmethod
    def of_status(cls, status: int) -> Outcome:
        """Of a whole answer. 4xx and 501 speak of the request, not of the replica."""
        if status < 400:
            return cls.OK
        if status < 500 or status == NOT_IMPLEMENTED:
            return cls.CLIENT_ERROR
        return cls.SERVER_ERROR


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """`failures` in a row open it; the wait before a trial doubles with each failed one."""

    failures: int = 3
    wait_s: float = 1.0
    max_wait_s: float = 10.0
    slow_start_s: float = 10.0


class Breaker:
    """Of one replica. `changed` is called with the new state, after each transition."""

    def __init__(
        self,
        rules: BreakerRules,
        clock: Callable[[], float],
        changed: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.state = State.CLOSED
        self._rules = rules
        self._clock = clock
        self.changed = changed
        self._failures = 0
        self._failed_trials = 0
        self._proven = True  # the latest probe succeeded, or nothing speaks against it
        self._since_s = clock()
        self._wait_s = rules.wait_s

    # What happened

    def probe_succeeded(self) -> None:
        """It answers probes: a trial may be made, at once unless earlier trials failed."""
        self._proven = True
        if self.state is State.OPEN and not self._failed_trials:
            self._to(State.HALF_OPEN)

    def refused(self) -> None:
        """Nobody is there: open until a probe succeeds. What comes back is another life."""
        self._proven = False
        self._failed_trials = 0
        self._open()

    def succeeded(self) -> None:
        """A request was answered."""
        self._failures = 0
        if self.state is State.HALF_OPEN:
            self._failed_trials = 0
            self._to(State.SLOW_START if self._rules.slow_start_s else State.CLOSED)

    def failed(self) -> None:
        """The connection broke, or the replica fell silent."""
        self._failures += 1
        if self.state is State.HALF_OPEN:
            self._failed_trials += 1
            self._open()
        elif self.state is not State.OPEN and self._failures >= self._rules.failures:
            self._open()

    def start_slowly(self) -> None:
        """It is new, awake again or let in again: give it work little by little."""
        if self.state in (State.CLOSED, State.SLOW_START) and self._rules.slow_start_s:
            self._to(State.SLOW_START)

    def advance(self) -> None:
        """Do what time alone changes."""
        if self._clock() < self.next_change_s:
            return
        self._to(State.HALF_OPEN if self.state is State.OPEN else State.CLOSED)

    # What follows from it

    @property
    def next_change_s(self) -> float:
        """When `advance` would change something, by the clock; infinity if never."""
        if self.state is State.OPEN and self._proven:
            return self._since_s + self._wait_s
        if self.state is State.SLOW_START:
            return self._since_s + self._rules.slow_start_s
        return math.inf

    @property
    def allowance(self) -> float:
        """Requests that may run at once, of those placed since it was half-open."""
        if self.state is State.CLOSED:
            return math.inf
        if self.state is State.SLOW_START:
            share = (self._clock() - self._since_s) / self._rules.slow_start_s
            return math.floor(math.pow(FULL_ALLOWANCE, min(share, 1.0)))
        return 1 if self.state is State.HALF_OPEN else 0

    def _open(self) -> None:
        rules = self._rules
        self._failures = 0
        self._since_s = self._clock()
        self._wait_s = min(rules.wait_s * 2.0 ** max(self._failed_trials - 1, 0), rules.max_wait_s)
        if self.state is not State.OPEN:
            self._to(State.OPEN)

    def _to(self, state: State) -> None:
        self.state = state
        self._since_s = self._clock()
        self.changed(state)
