"""The judge's histories on real sockets: publishers that bind, die and come back on their ports.

Time is real, so what is judged at once is only that nothing is claimed which was not held within
the lease; what must come right in the end is waited for. Connections really break, so the notices
of it come when the library gives them: late ones are part of it. What an answer leaves out, and
messages that are held back, belong to the pure part.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cache_index import CacheIndex, Holder, SourceSpec

from .judge.blocks import UNIT_TOKENS, Prompt
from .judge.engine import DEVICE, HOST
from .judge.rank import Rank
from .judge.stage import History, Misjudged
from .judge.wire import damaged
from .judge.world import World
from .listener import MODEL, PureListener, packed
from .publisher import Publisher

LONGEST_WAIT_S = 0.05
# After waits of this length in a history, and after restarts, what is claimed must come right.
LONG_WAIT_S = 0.2
RIGHT_WITHIN_S = 15.0


class SocketWorld(World):
    """A history whose messages go to indexes that follow real publishers."""

    def __init__(
        self, history: History, runner: asyncio.Runner, indexes: Sequence[CacheIndex]
    ) -> None:
        self._began_s = time.monotonic()
        super().__init__(history, PureListener(0))
        self._runner = runner
        self.indexes = list(indexes)
        self._publishers: list[Publisher | None] = [None] * len(self.ranks)
        self._ports: list[tuple[int, int]] = [(0, 0)] * len(self.ranks)
        self.checked = 0
        self._restarted = False
        for rank in self.ranks:
            self._open(rank)

    @property
    def now(self) -> float:
        return time.monotonic() - self._began_s

    @now.setter
    def now(self, value: float) -> None:
        """Time passes by itself."""

    def specs(self) -> list[SourceSpec]:
        """The sources to declare; their ports stay the same."""
        return [
            replace(publisher.spec("r", number), model=MODEL)
            for number, publisher in enumerate(self._publishers)
            if publisher is not None
        ]

    def close(self) -> None:
        for rank in self.ranks:
            self._close(rank)

    # --- processes

    def _open(self, rank: Rank) -> None:
        if self._publishers[rank.index] is not None:
            return

        async def opened() -> Publisher:
            port, replay_port = self._ports[rank.index]
            return Publisher(port=port, replay_port=replay_port)

        publisher = self._runner.run(opened())
        publisher._buffer = rank.publisher.buffer
        self._publishers[rank.index] = publisher
        self._ports[rank.index] = publisher.port, publisher.replay_port or 0

    def _close(self, rank: Rank) -> None:
        publisher, self._publishers[rank.index] = self._publishers[rank.index], None
        if publisher is not None:
            self._runner.run(publisher.close())

    def _send(self, rank: Rank, seq: int, payload: bytes) -> None:
        publisher = self._publishers[rank.index]
        if publisher is not None:
            self._runner.run(publisher.send_raw(b"", struct.pack(">Q", seq), payload))

    # --- operations

    def run(self) -> None:
        for name, *args in self._history.ops:
            if self._restarted and name != "regain":
                self._restarted = False
                self.right(least=False)
            getattr(self, name)(*args)
            self.judge()
        self.settle()

    def step(self, r: int) -> None:
        rank = self._rank(r)
        rank.step(self.now)
        seq, payload = rank.publisher.buffer[-1]
        link = rank.link
        if link.lose_next:
            link.lose_next -= 1
            return
        if link.damage_next:
            link.damage_next -= 1
            rank.damaged, payload = True, damaged(payload, seq)
        self._send(rank, seq, payload)

    def restart(self, r: int, new_seed: int, late: bool, lossy: bool = True) -> None:
        self.die(r, new_seed)
        self._open(self._rank(r))
        self._restarted = True

    def die(self, r: int, new_seed: int) -> None:
        rank = self._rank(r)
        self._close(rank)
        rank.verdict.restart(self.now)
        rank.begin(new_seed)

    def join(self, r: int) -> None:
        self._open(self._rank(r))

    def cut(self, r: int, lossy: bool) -> None:
        """Both sockets are gone; the process, its sequence and its buffer are not."""
        self._close(self._rank(r))

    def replays(self, r: int, mode: str, limit: int) -> None:
        publisher = self._publishers[self._rank(r).index]
        if publisher is not None:
            publisher.answering = mode != "silent"

    def redeliver(self, r: int, times: int) -> None:
        rank = self._rank(r)
        for seq, payload in list(rank.publisher.buffer)[-1:]:
            self._send(rank, seq, payload)

    def hold(self, r: int, held_back: bool, replay_first: bool) -> None: ...
    def answer(self, r: int) -> None: ...
    def deliver(self, r: int, replay: bool, count: int) -> None: ...

    def wait(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(min(seconds, LONGEST_WAIT_S)))
        if seconds >= LONG_WAIT_S:
            for rank in self.ranks:
                self.replays(rank.index, "full", 1)
            self.right(least=False)

    def settle(self) -> None:
        """Heal everything: each rank says one thing more, and all must be right."""
        for r, rank in enumerate(self.ranks):
            rank.link.lose_next = rank.link.damage_next = 0
            rank.garbage_next = False
            self._open(rank)
            self.replays(r, "full", 1)
            self.compute(r, r, 3, False)
            self.step(r)
        self.right(least=True)

    # --- the verdict

    def judge(self, often: bool = True) -> None:
        """At this very moment: nothing beyond what was held within the lease."""
        for index in self.indexes:
            for rank, prompt, tier, claim in self._claims(index):
                most = rank.verdict.at_most(prompt, tier, self.now)
                if claim > most:
                    self._misjudged(rank, prompt, tier, f"{claim} claimed, {most} in the lease")

    def right(self, *, least: bool) -> None:
        """Soon: nothing beyond what is held; with `least` all of it, and trust where it is due."""
        end_s = time.monotonic() + RIGHT_WITHIN_S
        while why := next(filter(None, (self._wrong(index, least) for index in self.indexes)), ""):
            if time.monotonic() > end_s:
                raise Misjudged(f"still after {RIGHT_WITHIN_S} s: {why}")
            self._runner.run(asyncio.sleep(0.02))
        self.checked += 1

    def _wrong(self, index: CacheIndex, least: bool) -> str:
        trusts = {status.rank: str(status.trust) for status in index.sources()}
        for rank in self.ranks if least else ():
            plain = len(rank.config.groups) == 1
            if plain and rank.replayable() and trusts[rank.index] != "exact":
                return f"rank {rank.index} is {trusts[rank.index]}"
        written = self._written_exactly() if least else frozenset()
        for rank, prompt, tier, claim in self._claims(index):
            most = rank.verdict.at_most_exactly(prompt, tier)
            exact = trusts[rank.index] == "exact" and rank.index in written
            due = rank.verdict.at_least(prompt, tier) if exact else 0
            if not due <= claim <= most:
                return f"rank {rank.index} {tier} {prompt}: {claim} claimed, {due} to {most} held"
        return ""

    def _written_exactly(self) -> frozenset[int]:
        """Whose writer is exact: a standby may know more, and finds what the writer has written."""
        return frozenset(
            status.rank
            for index in self.indexes
            for status in index.sources()
            if status.leading and status.trust == "exact"
        )

    def _claims(self, index: CacheIndex) -> Iterator[tuple[Rank, Prompt, str, int]]:
        for prompt in self._history.asked:
            found = index.match(0, packed(prompt))
            for rank in self.ranks:
                for tier in (DEVICE, HOST):
                    units = found.get(Holder("r", rank.index, tier), 0)
                    yield rank, prompt, tier, units * UNIT_TOKENS
