"""What has been taken of one publisher's life: its sequence, its digests, its blocks, its standing.

Pure: no sockets, no clock. What is to be taken, and in which order, is decided in `source.py`.
"""

from __future__ import annotations

from collections import Counter

from cache_index.identity import ModelIdentity
from cache_index.ledger import Ledger, NewEpoch, Operation
from cache_index.replay import Delivery
from cache_index.standing import Standing
from cache_index.types import Trust

__all__ = ["History"]

# Digests of this many batches are kept, to tell a batch that arrives twice from another life.
_RECENT_BATCHES = 4096


class History:
    """The current life, and how many there were before it."""

    def __init__(self, model: ModelIdentity, *, base_unit_tokens: int, lease_s: float) -> None:
        self.ledger = Ledger(model, base_unit_tokens)
        self.standing = Standing(lease_s)
        self.counts: Counter[str] = Counter()
        self.last_seq = -1
        self.batches = 0
        self.life = 0
        self.last_batch_at_s: float | None = None
        self._last_digest = 0
        self._recent: dict[int, int] = {}

    def trust(self, now_s: float) -> tuple[Trust, str]:
        """How far the source's entries count now, and why not further."""
        if self.ledger.unusable:
            return Trust.NONE, self.ledger.unusable
        return self.standing.trust(now_s, orphaned=self.ledger.orphaned)

    def _known(self, delivery: Delivery) -> bool:
        """Whether this very batch was taken before."""
        return self._recent.get(delivery.seq) == delivery.digest

    def _apply(self, delivery: Delivery, now_s: float, out: list[Operation]) -> None:
        if self.last_seq < 0:
            self.standing.complete = delivery.seq == 0
        self.last_seq = delivery.seq
        self._last_digest = delivery.digest
        self._recent[delivery.seq] = delivery.digest
        if len(self._recent) > _RECENT_BATCHES:
            del self._recent[next(iter(self._recent))]
        self.batches += 1
        self.last_batch_at_s = now_s
        batch = delivery.batch
        if batch is None or batch.malformed:
            # A removal may have been in it.
            self._drop("a batch could not be read", out)
            return
        if self.ledger.apply(batch.events, out):
            self.standing.whole()

    def _begin_life(self, reason: str, out: list[Operation]) -> None:
        self.counts["restart"] += 1
        self._clear(reason, out)
        self.ledger.forget_shape()
        self._recent.clear()
        self.last_seq = -1
        self.standing.begin()

    def _start_over(self, reason: str, out: list[Operation]) -> None:
        if self.last_seq >= 0:
            self._drop(reason, out)
        self.standing.lose(reason)
        self.last_seq = -1

    def _drop(self, reason: str, out: list[Operation]) -> None:
        self.counts["dropped"] += 1
        self._clear(reason, out)
        self.standing.lose(reason)

    def _clear(self, reason: str, out: list[Operation]) -> None:
        self.life += 1
        self.ledger.clear()
        out.append(NewEpoch(reason))
