"""From the frames of one publisher to what they mean for its state, with everything counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from cache_index.errors import MalformedBatch
from cache_index.events import END_OF_REPLAY, decode_batch, decode_seq, payload_digest
from cache_index.ledger import Operation
from cache_index.source import Delivery, SourceState

__all__ = ["Intake"]

LIVE_FRAMES = 3


class Intake:
    """Takes messages of one source, live and replayed. Nothing in them can make it raise.

    `news` is called when only a replay can settle what has come.
    """

    def __init__(self, state: SourceState, take: Callable[[Sequence[Operation]], None]) -> None:
        self.state = state
        self.failures: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.last_live_s = 0.0
        self.lag_s: float | None = None
        self.news: Callable[[], None] = lambda: None
        self._take = take

    def live(self, frames: Sequence[bytes]) -> None:
        """`[topic, sequence, payload]` from the live stream."""
        delivery = self._delivery(frames[1:] if len(frames) == LIVE_FRAMES else ())
        if delivery is None:
            return
        now_s = time.monotonic()
        if delivery.seq == END_OF_REPLAY:
            self.counts["publisher_reset"] += 1
            self._take(self.state.publisher_reset())
            return
        self._take(self.state.live(delivery, now_s))
        self.last_live_s = now_s
        if delivery.batch is not None:
            self.lag_s = time.time() - delivery.batch.timestamp_s
        if self.state.replay_wanted:
            self.news()

    def replayed(self, frames: Sequence[bytes]) -> None:
        """`[sequence, payload]` out of the answer to a replay request."""
        delivery = self._delivery(frames)
        if delivery is not None:
            self._take(self.state.replayed(delivery, time.monotonic()))

    def connected(self) -> None:
        """The live stream comes over a new connection."""
        self.counts["connected"] += 1
        self._take(self.state.connected(time.monotonic()))
        self.news()

    def void(self, reason: str) -> None:
        """Forget what the source holds; see SourceState.void."""
        self._take(self.state.void(reason))

    def end_replay(self, asked_at_s: float) -> None:
        """The replay asked for then has run to its end."""
        self._take(self.state.end_replay(asked_at_s, time.monotonic()))

    def fail_replay(self) -> None:
        """The replay has not run to its end."""
        self._take(self.state.fail_replay(time.monotonic()))

    def _delivery(self, frames: Sequence[bytes]) -> Delivery | None:
        """`[sequence, payload]` as a delivery; None, counted, if not even that can be read."""
        try:
            if len(frames) != 2:
                raise MalformedBatch("frames")
            seq = decode_seq(frames[0])
            if seq < END_OF_REPLAY:
                raise MalformedBatch("sequence")
        except MalformedBatch as error:
            self.failures[error.reason] += 1
            return None
        payload = frames[1]
        digest = payload_digest(payload)
        if seq == END_OF_REPLAY:
            return Delivery(seq, digest, None)
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self.failures[error.reason] += 1
            return Delivery(seq, digest, None)
        if batch.malformed or batch.unknown_tags or batch.unknown_fields:
            self.failures["event"] += batch.malformed
            self.counts["unknown_tag"] += batch.unknown_tags
            self.counts["unknown_field"] += batch.unknown_fields
        return Delivery(seq, digest, batch)
