"""One rank through all its lives: engine, publisher, link, and the verdict that follows them."""

from tests.cache_index.judge.engine import Engine, EngineConfig
from tests.cache_index.judge.network import Frame, Link, Publisher
from tests.cache_index.judge.verdict import Verdict
from tests.cache_index.judge.wire import Wire, damaged

WORK_S = 0.25
"""How long a listener may take over what it heard before it must be right, if it says exact."""


class Rank:
    """One rank through all its lives."""

    def __init__(self, index: int, config: EngineConfig, buffer_batches: int) -> None:
        self.index, self.config, self.buffer_batches = index, config, buffer_batches
        self.verdict, self.link = Verdict(config), Link()
        self.life, self._batches = -1, 0
        self.begin(0)

    def begin(self, seed: int) -> None:
        """A new life: nothing held, sequence 0, an empty replay buffer."""
        self.life += 1
        self.engine = Engine(self.config)
        self.wire = Wire(self.config, f"{seed}")
        self.publisher = Publisher(self.buffer_batches)
        self.sent: dict[int, bytes] = {}
        self.heard: set[int] = set()
        self.garbage_next = False
        self.spoilt = False
        self.damaged = False
        self.heard_at = 0.0

    def step(self, now: float, live: bool = True) -> None:
        """A scheduler step: what happened since the last goes out as one batch."""
        events = self.engine.take_events()
        self._batches += 1
        payload = self.wire.batch(1.7e9 + now + self._batches * 1e-6, events, self.index)
        self.verdict.say(events, now)
        if self.garbage_next:
            payload, self.garbage_next, self.spoilt = damaged(payload, self._batches), False, True
        seq = self.publisher.publish(payload)
        if not self.spoilt:
            self.sent[seq] = payload
        frame = Frame(now, self.life, seq, payload)
        if live:
            self.damaged |= self.link.damage_next > 0
            self.link.push(frame, damaged(payload, self._batches))

    def all_heard(self, now: float) -> bool:
        """Whether the listener has every batch of this life, and had time to work them off."""
        complete = 0 < self.publisher.next_seq == len(self.heard)
        return complete and not self.link.late_notices and now - self.heard_at >= WORK_S

    def replayable(self) -> bool:
        """Whether a replay can still give the whole life, unspoilt."""
        buffer = self.publisher.buffer
        return bool(buffer) and buffer[0][0] == 0 and not self.spoilt and not self.damaged

    def note_heard(self, frame: Frame, now: float) -> None:
        """A frame arrives at the listener: does it tell of this life, and whole?"""
        if frame.life == self.life and self.sent.get(frame.seq) == frame.payload:
            self.heard.add(frame.seq)
            self.heard_at = now
