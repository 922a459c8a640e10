"""From measured times to the constants of the simulated engine: pure arithmetic.

A prompt of n uncached tokens behind m cached ones is taken to cost
`c + a*n + b*(n*n + 2*n*m) + d*m` seconds, a decode round of B requests `e + f*B`. Constants are
never negative, and every point weighs by its relative error, so that short times count as much as
long ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import inf
from typing import NamedTuple

from loadgen.errors import CalibrationError

_SMALLEST_PIVOT = 1e-12


class Prefill(NamedTuple):
    """The first-token time of one request that had the engine to itself."""

    new_tokens: int
    cached_tokens: int
    ttft_s: float


class Decode(NamedTuple):
    """The time between two tokens while a batch of that size decodes."""

    batch: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Constants under the names that `loadgen.replica.model.EngineModel` has for them."""

    prefill_c_s: float
    prefill_a_s: float
    prefill_b_s: float
    prefill_cached_s: float
    decode_step_s: float
    decode_per_request_s: float

    def ttft_s(self, new_tokens: int, cached_tokens: int) -> float:
        """The first-token time of a request alone."""
        terms = _prefill_terms(new_tokens, cached_tokens)
        return _dot(
            (self.prefill_c_s, self.prefill_a_s, self.prefill_b_s, self.prefill_cached_s), terms
        )

    def json(self) -> dict[str, float]:
        """As it stands in a file, rounded to what was really measured."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode]) -> Timing:
    """The timing that fits best. Raises CalibrationError for too few different points."""
    rows = [(_prefill_terms(n, m), ttft_s) for n, m, ttft_s in prefills]
    prefill = _least_squares(rows, "prompts")
    steps = [((1.0, float(batch)), gap_s) for batch, gap_s in decodes]
    return Timing(*prefill, *_least_squares(steps, "batches"))


def worst_error(timing: Timing, prefills: Iterable[Prefill]) -> float:
    """The largest relative error over the points of prompts."""
    return max(abs(timing.ttft_s(n, m) / ttft_s - 1) for n, m, ttft_s in prefills)


def _prefill_terms(new: int, cached: int) -> tuple[float, ...]:
    return (1.0, float(new), float(new * (new + 2 * cached)), float(cached))


Row = tuple[tuple[float, ...], float]


def _least_squares(rows: Sequence[Row], what: str) -> tuple[float, ...]:
    """Non-negative least squares over relative errors, by trying every set of terms.

    There are at most four terms, so at most fifteen sets.
    """
    if not rows or any(value <= 0 for _, value in rows):
        raise CalibrationError(f"no times of {what} to fit")
    scaled = [tuple(term / value for term in terms) for terms, value in rows]
    size = len(rows[0][0])
    best, least = None, inf
    for count in range(1, size + 1):
        for used in combinations(range(size), count):
            found = _solve([[row[i] for i in used] for row in scaled])
            if found is None or min(found) < 0:
                continue
            error = sum((_dot([row[i] for i in used], found) - 1) ** 2 for row in scaled)
            # One term more has to earn its place.
            if error < least * 0.999:
                best, least = dict(zip(used, found, strict=True)), error
    if best is None:
        raise CalibrationError(f"the times of {what} fit no timing")
    return tuple(best.get(i, 0.0) for i in range(size))


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x with the least |rows x - 1|, by the normal equations; None where they are singular."""
    size = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    unit = [[row[i] / scale[i] for i in range(size)] for row in rows]
    columns = list(zip(*unit, strict=True))
    table = [[*(_dot(left, right) for right in columns), sum(left)] for left in columns]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(table[k][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < _SMALLEST_PIVOT:
            return None
        for k in range(size):
            if k != i:
                factor = table[k][i] / table[i][i]
                table[k] = [x - factor * y for x, y in zip(table[k], table[i], strict=True)]
    return [table[i][size] / table[i][i] / scale[i] for i in range(size)]


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
