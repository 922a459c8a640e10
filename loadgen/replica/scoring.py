"""Invented but well-formed results of pooling models: fixed by the token ids, nothing else."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from math import sqrt
from random import Random
from sys import byteorder

from xxhash import xxh3_64_intdigest

DEFAULT_DIMENSIONS = 384
MAX_DIMENSIONS = 4096
LABELS = ("LABEL_0", "LABEL_1")
_SPAN = float(1 << 64)


def embedding(token_ids: Sequence[int], dimensions: int = DEFAULT_DIMENSIONS) -> list[float]:
    """A vector of length 1; a shorter one is the beginning of a longer one, made 1 long again."""
    random = Random(_digest(token_ids))
    values = [random.gauss(0.0, 1.0) for _ in range(dimensions)]
    length = sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def as_base64(values: Sequence[float]) -> str:
    """The wire form of `encoding_format: base64`: 32-bit floats, little endian."""
    packed = array("f", values)
    if byteorder == "big":
        packed.byteswap()
    return b64encode(packed.tobytes()).decode()


def score(first_ids: Sequence[int], second_ids: Sequence[int]) -> float:
    """How well two texts fit, 0 to 1."""
    return _digest(second_ids, _digest(first_ids)) / _SPAN


def label_probabilities(token_ids: Sequence[int]) -> list[float]:
    """One probability for each of `LABELS`, together 1."""
    share = _digest(token_ids) / _SPAN
    return [share, 1.0 - share]


def _digest(token_ids: Sequence[int], seed: int = 0) -> int:
    return xxh3_64_intdigest(array("I", token_ids).tobytes(), seed)
