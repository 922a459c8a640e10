"""Runs a history on its stage: each operation is a method."""

from tests.cache_index.judge.engine import DEVICE, HOST, Noise
from tests.cache_index.judge.rank import Rank
from tests.cache_index.judge.stage import Stage
from tests.cache_index.judge.verdict import LEASE_S, TRANSIT_S
from tests.cache_index.judge.wire import shows_extra_keys, shows_tiers


class World(Stage):
    """Runs operations and judges after each. `ops` of a history name its methods."""

    def run(self) -> None:
        """The whole history, then a healed network in which the listener must recover."""
        for name, *args in self._history.ops:
            getattr(self, name)(*args)
            self.pump()
            self.judge()
        self.settle()

    # --- the engine

    def compute(self, r: int, prompt: int, upto: int, doubles: bool) -> None:
        """Prefill a prompt up to some block."""
        rank, wanted = self._rank(r), self._prompt(prompt)
        plain = wanted.root.salt is None and not wanted.has_pictures()
        if plain or shows_extra_keys(rank.config.version):
            rank.engine.compute(wanted, upto, doubles)

    def offload(self, r: int, prompt: int, first: int, upto: int) -> None:
        """Copy blocks of a prompt to the host tier."""
        rank = self._rank(r)
        if shows_tiers(rank.config.version) and len(rank.config.groups) == 1:
            rank.engine.offload(self._prompt(prompt), first, upto)

    def evict(self, r: int, pick: int, count: int, host: bool) -> None:
        """Forget some blocks, wherever in their chains."""
        self._rank(r).engine.evict(pick, count, HOST if host else DEVICE)

    def clear(self, r: int, host: bool) -> None:
        """Forget everything."""
        self._rank(r).engine.clear(host)

    def noise(self, r: int, kind: int, prompt: int) -> None:
        """Say something unknown."""
        rank = self._rank(r)
        blocks = self._prompt(prompt).blocks(rank.config.block_units)
        seen = shows_extra_keys(rank.config.version) and bool(blocks)
        rank.engine.unsaid.append(Noise(kind, blocks[0] if seen else None))

    def step(self, r: int) -> None:
        """Publish what happened."""
        self._rank(r).step(self.now)

    def garbage(self, r: int) -> None:
        """The next batch is unreadable at its very source."""
        self._rank(r).garbage_next = True

    def restart(self, r: int, new_seed: int, late: bool, lossy: bool = True) -> None:
        """The process dies and another listens at once on the same address.

        Unless `lossy`, what the old one sent last still arrives.
        """
        rank = self._rank(r)
        was_connected = rank.link.connected
        self._break(rank, lossy)
        rank.verdict.restart(self.now)
        rank.begin(new_seed)
        if was_connected:
            self._notice(rank, ["disconnected", "connected"], late)
            rank.link.connected = True

    def die(self, r: int, new_seed: int) -> None:
        """The process dies; the next one is connected to later."""
        rank = self._rank(r)
        self.cut(r, False)
        rank.verdict.restart(self.now)
        rank.begin(new_seed)

    def regain(self, r: int, beyond: int, prompt: int) -> None:
        """Batches nobody hears live, until the sequence of the last heard batch is passed."""
        rank = self._rank(r)
        last = rank.link.last_live.seq if rank.link.last_live else 0
        while rank.publisher.next_seq < min(last + beyond, 40):
            self.compute(r, prompt + rank.publisher.next_seq, 1 + rank.publisher.next_seq % 4, True)
            rank.step(self.now, live=False)

    # --- the network

    def join(self, r: int) -> None:
        """The connection comes up."""
        rank = self._rank(r)
        if not rank.link.connected:
            rank.link.connected = True
            self._notice(rank, ["connected"], False)

    def cut(self, r: int, lossy: bool) -> None:
        """The connection breaks."""
        rank = self._rank(r)
        if rank.link.connected:
            self._break(rank, lossy)
            self._notice(rank, ["disconnected"], False)

    def _break(self, rank: Rank, lossy: bool) -> None:
        """What is still heard of a connection is heard before its end is told."""
        while rank.link.live and not lossy:
            self._give(rank, False)
        rank.link.cut(lossy)

    def lose(self, r: int, count: int) -> None:
        """The next live messages are lost; the connection stays."""
        self._rank(r).link.lose_next = count

    def damage(self, r: int, count: int) -> None:
        """The next live messages arrive unreadable."""
        self._rank(r).link.damage_next = count

    def replays(self, r: int, mode: str, limit: int) -> None:
        """How replay requests are answered from now on."""
        link = self._rank(r).link
        link.replay_mode, link.replay_limit = mode, limit

    def hold(self, r: int, held_back: bool, replay_first: bool) -> None:
        """Whether messages wait for `deliver`, and which socket is read first."""
        link = self._rank(r).link
        link.held_back, link.replay_first = held_back, replay_first

    def answer(self, r: int) -> None:
        """The publisher reads its replay requests."""
        rank = self._rank(r)
        self._collect(rank)
        rank.link.answer(rank.publisher, rank.life, self.now)

    def deliver(self, r: int, replay: bool, count: int) -> None:
        """Some held messages of one socket arrive."""
        rank = self._rank(r)
        queue = rank.link.replay if replay else rank.link.live
        for _ in range(min(count, len(queue))):
            self._give(rank, replay)

    def redeliver(self, r: int, times: int) -> None:
        """The last live message arrives again."""
        rank = self._rank(r)
        frame = rank.link.last_live
        for _ in range(times):
            if frame is not None and rank.link.repeatable:
                self._listener.heard(rank.index, frame, self.now)

    def settle(self) -> None:
        """Heal everything: the listener must come to trust each rank, and be right."""
        for r, rank in enumerate(self.ranks):
            rank.link.lose_next = rank.link.damage_next = 0
            rank.garbage_next = False
            self.replays(r, "full", 1)
            self.hold(r, False, False)
            self.join(r)
            rank.step(self.now)
        self.wait(3 * LEASE_S)
        self._judge_recovery()
        for r, rank in enumerate(self.ranks):
            self.compute(r, r, 3, False)
            rank.step(self.now)
        self.pump()
        self.judge()
        self.wait(LEASE_S + 2 * TRANSIT_S)
        self.judge()
        self._judge_recovery()
