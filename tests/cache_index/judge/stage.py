"""The stage of a history: the ranks, the clock, what arrives when, and the verdict on claims."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tests.cache_index.judge.blocks import Prompt
from tests.cache_index.judge.engine import DEVICE, HOST, EngineConfig
from tests.cache_index.judge.network import Frame
from tests.cache_index.judge.rank import Rank
from tests.cache_index.judge.verdict import LEASE_S, TRANSIT_S

TICK_S = TRANSIT_S / 2
Op = tuple[Any, ...]


class History(NamedTuple):
    """A history as data: (operation, arguments...) each. Numbers are taken modulo what is there."""

    configs: tuple[EngineConfig, ...]
    buffers: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    asked: tuple[Prompt, ...]
    ops: tuple[Op, ...]


class Listener(Protocol):
    """What is judged: an index that hears every rank and is asked for matches."""

    def connected(self, rank: int, now: float) -> None: ...
    def disconnected(self, rank: int, now: float) -> None: ...
    def heard(self, rank: int, frame: Frame, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def take_requests(self, rank: int, now: float) -> Sequence[tuple[int, int]]: ...
    def trust(self, rank: int, now: float) -> str: ...
    def claimed(self, prompt: Prompt, now: float) -> dict[tuple[int, str], int]: ...


class Misjudged(AssertionError):
    """The listener claimed too much, or too little for what it said of itself."""


class Stage:
    """Ranks before one listener. Time passes here, messages arrive, claims are judged."""

    def __init__(self, history: History, listener: Listener) -> None:
        self._history, self._listener = history, listener
        self.ranks = [
            Rank(i, config, buffer)
            for i, (config, buffer) in enumerate(zip(history.configs, history.buffers, strict=True))
        ]
        self.now = 0.0
        self.judged = 0

    def wait(self, seconds: float) -> None:
        """Time passes; nothing stays under way longer than TRANSIT_S."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            for rank in self.ranks:
                self._hurry(rank)
            self._listener.tick(self.now)
            self.pump()
            self.judge(often=False)

    def pump(self) -> None:
        """Deliver everything that is not held back."""
        for rank in self.ranks:
            for _ in range(50):
                self._collect(rank)
                if rank.link.held_back or not self._pump_once(rank):
                    break
            else:
                raise Misjudged(f"rank {rank.index} is asked for replays without end")

    def judge(self, often: bool = True) -> None:
        """Compare every claim with what is allowed now."""
        now = self.now
        asked = self._history.asked if often else self._history.asked[:3]
        trusts = [self._listener.trust(rank.index, now) for rank in self.ranks]
        for prompt in asked:
            claims = self._listener.claimed(prompt, now)
            for rank, trust in zip(self.ranks, trusts, strict=True):
                for tier in (DEVICE, HOST):
                    claim = claims.get((rank.index, tier), 0)
                    self._judge_one(rank, trust, prompt, tier, claim)
        self.judged += len(asked)

    def _judge_one(self, rank: Rank, trust: str, prompt: Prompt, tier: str, claim: int) -> None:
        verdict = rank.verdict
        if claim and trust == "none":
            self._misjudged(rank, prompt, tier, f"{claim} claimed without trust")
        if claim and claim > (most := verdict.at_most(prompt, tier, self.now)):
            self._misjudged(rank, prompt, tier, f"{claim} claimed, {most} held within the lease")
        quiet = self.now - verdict.changed_at > LEASE_S + 2 * TRANSIT_S
        if trust != "exact" or not (quiet or rank.all_heard(self.now)):
            return
        least, most = verdict.at_least(prompt, tier), verdict.at_most_exactly(prompt, tier)
        if not least <= claim <= most:
            self._misjudged(rank, prompt, tier, f"exact, {claim} claimed, {least} to {most} held")

    def _misjudged(self, rank: Rank, prompt: Prompt, tier: str, why: str) -> None:
        raise Misjudged(f"rank {rank.index} {tier} {prompt} at {self.now:.3f}: {why}")

    def _judge_recovery(self) -> None:
        for rank in self.ranks:
            trust = self._listener.trust(rank.index, self.now)
            hybrid = len(rank.config.groups) > 1
            if rank.replayable() and trust != "exact" and not (hybrid and trust == "partial"):
                raise Misjudged(f"rank {rank.index}: {trust} though its whole life can be replayed")
            if trust == "none" and not rank.spoilt and not (hybrid and not rank.replayable()):
                raise Misjudged(f"rank {rank.index}: never trusted again")

    def _rank(self, r: int) -> Rank:
        return self.ranks[r % len(self.ranks)]

    def _prompt(self, p: int) -> Prompt:
        return self._history.prompts[p % len(self._history.prompts)]

    def _notice(self, rank: Rank, notices: list[str], late: bool) -> None:
        rank.link.late_notices += notices
        if not late:
            self._tell_notices(rank)

    def _tell_notices(self, rank: Rank) -> None:
        notices, rank.link.late_notices = rank.link.late_notices, []
        for notice in notices:
            getattr(self._listener, notice)(rank.index, self.now)

    def _collect(self, rank: Rank) -> None:
        for request, start_seq in self._listener.take_requests(rank.index, self.now):
            rank.link.requests.append((self.now, request, start_seq))

    def _pump_once(self, rank: Rank) -> bool:
        link = rank.link
        busy = bool(link.requests or link.live or link.replay)
        link.answer(rank.publisher, rank.life, self.now)
        for replay in (link.replay_first, not link.replay_first):
            while link.replay if replay else link.live:
                self._give(rank, replay)
        return busy

    def _hurry(self, rank: Rank) -> None:
        """Whatever is under way has arrived before more than TRANSIT_S passed."""
        self._tell_notices(rank)
        self._collect(rank)
        link = rank.link
        if link.requests and link.requests[0][0] <= self.now - TICK_S:
            link.answer(rank.publisher, rank.life, self.now)
        for replay, queue in ((False, link.live), (True, link.replay)):
            while queue and queue[0].sent_s <= self.now - TICK_S:
                self._give(rank, replay)

    def _give(self, rank: Rank, replay: bool) -> None:
        link = rank.link
        frame = (link.replay if replay else link.live).popleft()
        if not replay:
            link.last_live, link.repeatable = frame, True
        rank.note_heard(frame, self.now)
        self._listener.heard(rank.index, frame, self.now)
