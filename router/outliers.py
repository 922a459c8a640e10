"""Replicas that do worse than their peers: by errors, or by the time to the first token.

Pure functions over a snapshot of one group, which is what serves one base model. At most half of a
group is ejected, so one that is alone never is; each further ejection of a replica lasts longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import NamedTuple

WINDOW_S = 30
TTFT_SAMPLES = 64


class Kind(StrEnum):
    """Why a replica was ejected."""

    ERRORS = "errors"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class OutlierRules:
    """`error_share` and `ttft_factor` of 0 switch that kind of ejection off.

    Errors: at least `least_requests` in the window, at least `error_share` of them failed, and that
    is more than twice the peers' median share. Latency: the median time to the first token of at
    least `least_ttfts` streams is `ttft_factor` times the peers' median, and above `ttft_floor_s`.
    """

    least_requests: int = 10
    error_share: float = 0.5
    least_ttfts: int = 20
    ttft_factor: float = 5.0
    ttft_floor_s: float = 1.0
    eject_s: float = 10.0
    max_eject_s: float = 300.0
    forgive_s: float = 60.0


class Standing(NamedTuple):
    """One replica of the group. `ttft_s` is None below `least_ttfts`."""

    name: str
    requests: int
    errors: int
    ttft_s: float | None
    ejected_since_s: float | None


def outliers(group: Sequence[Standing], rules: OutlierRules) -> dict[str, Kind]:
    """Whom to eject now, worst first: errors before latency."""
    well = [each for each in group if each.ejected_since_s is None]
    room = len(group) // 2 - (len(group) - len(well))
    if room <= 0:
        return {}
    found = dict.fromkeys(_failing(well, rules), Kind.ERRORS)
    for name in _slow(well, rules):
        found.setdefault(name, Kind.LATENCY)
    return dict(list(found.items())[:room])


def excess(group: Sequence[Standing]) -> list[str]:
    """Whom to let in again because more than half of the group, which has shrunk, is ejected."""
    out = [(each.ejected_since_s, each.name) for each in group if each.ejected_since_s is not None]
    return [name for _, name in sorted(out)[: max(len(out) - len(group) // 2, 0)]]


def ejection_s(repeats: int, rules: OutlierRules) -> float:
    """How long the `repeats`-th ejection lasts, counted from 1."""
    return min(rules.eject_s * 2.0 ** min(repeats - 1, 32), rules.max_eject_s)


def next_repeats(repeats: int, well_s: float, rules: OutlierRules) -> int:
    """Which ejection this is, after `well_s` without one: each `forgive_s` takes one off."""
    return max(repeats - int(well_s / rules.forgive_s), 0) + 1


def _failing(well: Sequence[Standing], rules: OutlierRules) -> list[str]:
    if not rules.error_share:
        return []
    shares = {
        each.name: each.errors / each.requests
        for each in well
        if each.requests >= rules.least_requests
    }
    found = [
        name
        for name, share in shares.items()
        if share >= rules.error_share and share > 2 * _of_peers(median_low, shares, name, alone=0.0)
    ]
    return sorted(found, key=lambda name: -shares[name])


def _slow(well: Sequence[Standing], rules: OutlierRules) -> list[str]:
    if not rules.ttft_factor:
        return []
    times_s = {each.name: each.ttft_s for each in well if each.ttft_s is not None}
    found = [
        name
        for name, ttft_s in times_s.items()
        if ttft_s > rules.ttft_floor_s
        and ttft_s > rules.ttft_factor * _of_peers(median, times_s, name, alone=ttft_s)
    ]
    return sorted(found, key=lambda name: -times_s[name])


def _of_peers(
    average: Callable[[list[float]], float], values: dict[str, float], name: str, *, alone: float
) -> float:
    """An average of the others; `alone` where there are none to compare with."""
    others = [value for other, value in values.items() if other != name]
    return average(others) if others else alone


class Traffic:
    """What became of a replica's requests lately: seconds of counts, and first-token times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # [second, requests, errors]
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=TTFT_SAMPLES)

    def add(self, *, failed: bool) -> None:
        """An attempt has ended."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        self._seconds[-1][1] += 1
        self._seconds[-1][2] += failed

    def add_ttft(self, seconds: float) -> None:
        """A stream's first byte has arrived."""
        self._ttfts.append((self._clock(), seconds))

    def clear(self) -> None:
        """Forget all: what follows is judged by itself."""
        self._seconds.clear()
        self._ttfts.clear()

    def standing(self, name: str, ejected_since_s: float | None, least_ttfts: int) -> Standing:
        """The last `WINDOW_S` seconds in numbers."""
        oldest_s = self._clock() - WINDOW_S
        recent = [each for each in self._seconds if each[0] >= oldest_s]
        ttfts_s = [ttft_s for at_s, ttft_s in self._ttfts if at_s >= oldest_s]
        return Standing(
            name,
            sum(each[1] for each in recent),
            sum(each[2] for each in recent),
            median(ttfts_s) if len(ttfts_s) >= least_ttfts else None,
            ejected_since_s,
        )
