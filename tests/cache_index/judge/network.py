"""The publisher and the faulty network between it and one listener, as queues that are data."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

END = -1


class Frame(NamedTuple):
    """A message on the way: live, or an answer to the replay request `request`."""

    sent_s: float
    life: int
    seq: int
    payload: bytes
    request: int = -1


@dataclass
class Publisher:
    """One life's sequence and its replay buffer."""

    buffer_batches: int
    next_seq: int = 0
    buffer: deque[tuple[int, bytes]] = field(default_factory=deque)

    def publish(self, payload: bytes) -> int:
        """Number the payload and keep it for replay."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.buffer.append((seq, payload))
        while len(self.buffer) > self.buffer_batches:
            self.buffer.popleft()
        return seq

    def answer(self, start_seq: int) -> list[tuple[int, bytes]]:
        """What a replay request gets, END last."""
        return [(s, p) for s, p in self.buffer if s >= start_seq] + [(END, b"")]


@dataclass
class Link:
    """The two sockets of a listener: each keeps its order, neither waits for the other."""

    connected: bool = False
    live: deque[Frame] = field(default_factory=deque)
    replay: deque[Frame] = field(default_factory=deque)
    requests: deque[tuple[float, int, int]] = field(default_factory=deque)
    lose_next: int = 0
    damage_next: int = 0
    replay_mode: str = "full"
    replay_limit: int = 1
    held_back: bool = False
    replay_first: bool = False
    last_live: Frame | None = None
    repeatable: bool = False
    late_notices: list[str] = field(default_factory=list)

    def push(self, frame: Frame, damaged: bytes) -> None:
        """A live message leaves the publisher. Without a connection nobody hears it."""
        if not self.connected:
            return
        if self.lose_next > 0:
            self.lose_next -= 1
        elif self.damage_next > 0:
            self.damage_next -= 1
            self.live.append(frame._replace(payload=damaged))
        else:
            self.live.append(frame)

    def answer(self, publisher: Publisher, life: int, now: float) -> None:
        """The publisher gets to the requests: whole, torn, without END, or not at all."""
        while self.requests:
            _, request, start_seq = self.requests.popleft()
            frames = publisher.answer(start_seq)
            if self.replay_mode == "silent" or not self.connected:
                continue
            if self.replay_mode == "torn":
                frames = frames[: self.replay_limit]
            if self.replay_mode == "no_end":
                frames = frames[:-1]
            self.replay.extend(Frame(now, life, seq, payload, request) for seq, payload in frames)

    def cut(self, lossy: bool) -> None:
        """The connection breaks; `lossy` takes answers that were under way with it."""
        self.connected = False
        self.requests.clear()
        self.live.clear()
        self.repeatable = False
        if lossy:
            self.replay.clear()
