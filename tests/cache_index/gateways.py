"""Two gateways on one Redis before the judge; either may die between any two Redis commands.

Both hear every frame. One leads a source and writes it, the other stands by; the one that dies
starts over empty, and the other takes its leases over at once, as after their end.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import count
from typing import Any

from cache_index.changes import apply_changes, holder_record, load_node
from cache_index.ledger import Operation
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.types import SourceKey
from cache_index.writer import SourceWriter

from .judge.blocks import UNIT_TOKENS, Prompt
from .judge.network import Frame
from .listener import Followed, packed

MAX_UNITS = 1_000_000
LEASE_MS = 3_600_000


class Died(Exception):
    """The process of a gateway is gone."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway


class Gateway:
    """One process: its view of the sources, its writers, its mirror."""

    def __init__(self, redis: RedisIndex, ranks: int, requests: Iterator[int]) -> None:
        self.owner = uuid.uuid4().hex
        self.redis = redis
        self.sources = [Followed(requests) for _ in range(ranks)]
        self.writers = [
            SourceWriter(SourceKey("r", rank), source.state.ledger)
            for rank, source in enumerate(self.sources)
        ]
        self.radix: RadixIndex | None = None
        self._position = 0

    async def refresh(self) -> None:
        """Bring the mirror up to date."""
        if self.radix is None:
            await self._load()
        page = await self.redis.read_changes(self._position, 1)
        for entry_id, data in page.entries:
            assert entry_id == self._position + 1
            apply_changes(self.radix, data)
            self._position = entry_id

    async def _load(self) -> None:
        snapshot = await self.redis.snapshot()
        self.radix, self._position = RadixIndex(MAX_UNITS), snapshot.position
        for holder_id, record in snapshot.holders.items():
            self.radix.add_holder(holder_id, holder_record(record))
        async for page in self.redis.nodes():
            for node_id, value in page:
                load_node(self.radix, node_id, value)


class RedisListener:
    """What the judge hears of the two. `crash_at`: the command that its process does not survive.

    `answered` False: Redis never got that command. True: it did, and nobody read the answer.
    """

    def __init__(
        self, runner: asyncio.Runner, url: str, ranks: int, crash_at: int, answered: bool
    ) -> None:
        self._runner, self._ranks = runner, ranks
        self.redis = RedisIndex(
            url, base_unit_tokens=UNIT_TOKENS, max_units=MAX_UNITS, namespace=uuid.uuid4().hex
        )
        self._crash_at, self._answered = crash_at, answered
        self._requests = count()
        self.commands = 0
        self._buried: list[str] = []
        self.gateways = [self._gateway(), self._gateway()]
        self._linked = [False] * ranks
        self._leaders: list[Gateway | None] = [None] * ranks
        self._turn = 0

    def _gateway(self) -> Gateway:
        return Gateway(self.redis, self._ranks, self._requests)

    def close(self) -> None:
        self._runner.run(self.redis.close())

    # --- what the judge says

    def connected(self, rank: int, now: float) -> None:
        self._linked[rank] = True
        self._take(rank, now, lambda source: source.state.connected(now))

    def disconnected(self, rank: int, now: float) -> None:
        self._linked[rank] = False
        for gateway in self.gateways:
            gateway.sources[rank].state.disconnected()

    def heard(self, rank: int, frame: Frame, now: float) -> None:
        self._turn += 1
        self._take(rank, now, lambda source: source.heard(frame, now))

    def tick(self, now: float) -> None:
        self._turn += 1
        for rank in range(self._ranks):
            self._take(rank, now, lambda source: source.tick(now))

    def take_requests(self, rank: int, now: float) -> Sequence[tuple[int, int]]:
        return [r for g in self.gateways for r in g.sources[rank].take_requests(now)]

    def trust(self, rank: int, now: float) -> str:
        trust = self._asked().sources[rank].trust(now)
        leader = self._leaders[rank]
        # A standby cannot know more than the writer has written.
        behind = leader is None or leader.sources[rank].trust(now) != "exact"
        return "partial" if trust == "exact" and behind else trust

    def claimed(self, prompt: Prompt, now: float) -> dict[tuple[int, str], int]:
        asked = self._asked()
        if asked.radix is None:
            return {}
        return {
            (holder.rank, holder.tier): units * UNIT_TOKENS
            for holder, units in asked.radix.match(packed(prompt)).items()
            if asked.sources[holder.rank].trust(now) != "none"
        }

    def _asked(self) -> Gateway:
        return self.gateways[self._turn % 2]

    # --- what the gateways do

    def _take(self, rank: int, now: float, hear: Callable[[Followed], Sequence[Operation]]) -> None:
        for gateway in self.gateways:
            gateway.writers[rank].add(hear(gateway.sources[rank]))
        self._runner.run(self._work(rank, now))

    async def _work(self, rank: int, now: float) -> None:
        """Keep the lease where the source is in sight, write, and follow."""
        wrote = False
        for _ in range(3):
            try:
                await self._keep_lease(rank, now)
                leader = self._leaders[rank]
                if leader is not None and leader.writers[rank].busy:
                    wrote = True
                    await self._drain(leader, leader.writers[rank])
                break
            except Died as death:
                self._bury(death.gateway, now)
        if wrote or any(gateway.radix is None for gateway in self.gateways):
            for gateway in self.gateways:
                await gateway.refresh()

    async def _keep_lease(self, rank: int, now: float) -> None:
        leader = self._leaders[rank]
        key = SourceKey("r", rank)
        if leader is not None and leader.sources[rank].trust(now) == "none":
            leader.writers[rank].stop()
            self._leaders[rank] = None
            await self._command(leader, self.redis.release(key, leader.owner))
        if self._leaders[rank] is None:
            for gateway in self.gateways:
                if gateway.sources[rank].trust(now) != "none":
                    await self._acquire(gateway, rank, key)
                    return

    async def _acquire(self, gateway: Gateway, rank: int, key: SourceKey) -> None:
        # Whoever held it before is gone: its lease has ended.
        for owner in self._buried:
            await self.redis.release(key, owner)
        asking = self.redis.acquire(key, gateway.owner, LEASE_MS, "g")
        token, _ = await self._command(gateway, asking)
        assert token
        self._leaders[rank] = gateway
        gateway.writers[rank].lead(token)

    async def _drain(self, gateway: Gateway, writer: SourceWriter) -> None:
        while (call := writer.next_call()) is not None:
            (outcome,) = await self._command(gateway, self.redis.apply([call]))
            if isinstance(outcome, tuple):
                writer.settle(*outcome)
            else:
                writer.fail()

    async def _command(self, gateway: Gateway, command: Coroutine[Any, Any, Any]) -> Any:
        self.commands += 1
        if self.commands != self._crash_at:
            return await command
        if self._answered:
            await command
        else:
            command.close()
        raise Died(gateway)

    def _bury(self, dead: Gateway, now: float) -> None:
        fresh = self._gateway()
        self._buried.append(dead.owner)
        self.gateways[self.gateways.index(dead)] = fresh
        self._leaders = [None if leader is dead else leader for leader in self._leaders]
        for rank, linked in enumerate(self._linked):
            if linked:
                fresh.sources[rank].state.connected(now)
