"""What `loadgen calibrate` wrote of a replica's speed, for an engine that is to be as fast."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import orjson

from loadgen.replica.errors import ReplicaError

TIMES = (
    "prefill_c_s",
    "prefill_a_s",
    "prefill_b_s",
    "prefill_cached_s",
    "decode_step_s",
    "decode_per_request_s",
)


def read_calibration(path: Path) -> dict[str, float]:
    """The engine's constants by name, in seconds. Raises ReplicaError for any other file."""
    try:
        timing = orjson.loads(path.read_bytes())["timing"]
        times = {name: float(timing[name]) for name in TIMES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = error if isinstance(error, OSError) else f"{path} was not written by calibrate"
        raise ReplicaError(f"--calibration: {told}") from error
    if not all(isfinite(value) and value >= 0 for value in times.values()):
        raise ReplicaError(f"--calibration: {path} has times that are no times")
    return times
