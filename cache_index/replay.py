"""What one answer to a replay request must show first, and what it has shown. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from cache_index.events import EventBatch

__all__ = ["Delivery", "Replay", "Verdict"]


class Delivery(NamedTuple):
    """One message of a publisher. `batch` is None when its payload could not be decoded."""

    seq: int
    digest: int
    batch: EventBatch | None


class Verdict(Enum):
    """What the first batch of an answer says about who sends it."""

    SAME_LIFE = auto()
    OTHER_LIFE = auto()
    NEWS = auto()


@dataclass(slots=True)
class Replay:
    """A replay under way.

    `confirming`: it must begin with the last batch known. `rebuild`: all is asked for again.
    `outdated`: the publisher may be another one since it was asked for.
    `torn`: batches were missing in its middle, so what came after them was not applied.
    `probe`: nothing was known to be missing when it was asked for. `asked`: sequence and digest of
    the batch that it must begin with; live batches may have been taken since.
    """

    confirming: bool
    rebuild: bool
    other_life: bool = False
    confirmed: bool = False
    torn: bool = False
    taken: int = 0
    outdated: bool = False
    probe: bool = False
    asked: tuple[int, int] = (-1, 0)

    def confirm(self, delivery: Delivery, last_seq: int, *, known: bool) -> Verdict:
        """Judge the first batch. `known`: it has been taken; `last_seq`: the last one that was."""
        self.confirming = False
        if known or (delivery.seq, delivery.digest) == self.asked:
            self.confirmed = True
            return Verdict.SAME_LIFE
        if delivery.seq <= last_seq:
            self.other_life = True
            return Verdict.OTHER_LIFE
        return Verdict.NEWS
