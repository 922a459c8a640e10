"""Random histories: the wire model, Redis and the mirror must give the same match."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_index import Holder, Root, chain_packed, pack_tokens
from cache_index.blocks import unpack_hashes
from cache_index.changes import apply_changes, holder_record, load_node
from cache_index.events import decode_batch, payload_digest
from cache_index.ledger import Operation
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.source import Delivery, SourceState
from cache_index.types import SourceKey
from cache_index.writer import SourceWriter

from .conftest import Server
from .publisher import MODEL, encode
from .wire_model import EngineModel, Prefix, block_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Enough for every change; a longer search is a matter of patience.
EXAMPLES = int(os.environ.get("KVROUTE_TEST_HISTORIES", "20"))
SALTS = ("", "tenant-a")
# Long common beginnings, so that runs of 64 fill up, overflow and are left in their middle.
STEMS = ((), (0,) * 5, (0,) * 63, (0,) * 64, (0,) * 70 + (1,) * 70)


class Life:
    """One engine, its state machine and its writer."""

    def __init__(self, replica: str, size: int) -> None:
        self.key = SourceKey(replica, 0)
        self.model = EngineModel(size)
        self.state = SourceState(MODEL, base_unit_tokens=16, lease_s=5.0, replayable=True)
        self.state.begin_replay()
        self.state.end_replay(0.0, 0.0)
        self.writer = SourceWriter(self.key, self.state.ledger)
        self.seq = 0
        self.sent: list[Delivery] = []

    def batch(self, *events: dict[str, Any]) -> Delivery:
        payload = encode(events, timestamp_s=float(self.seq))
        delivery = Delivery(self.seq, payload_digest(payload), decode_batch(payload))
        self.seq += 1
        self.sent.append(delivery)
        return delivery

    def take(self, operations: list[Operation]) -> None:
        self.writer.add(operations)

    def replay(self) -> None:
        """Answer replay requests until the source is content."""
        while self.state.replay_wanted:
            start = self.state.begin_replay()
            for delivery in self.sent:
                if delivery.seq >= start:
                    self.take(self.state.replayed(delivery, 1.0))
            self.take(self.state.end_replay(1.0, 1.0))


@dataclass
class World:
    redis: RedisIndex
    radix: RadixIndex
    lives: list[Life]
    position: int = 0

    async def lead(self, life: Life, owner: str = "test") -> None:
        token, _ = await self.redis.acquire(life.key, owner, 60_000, uuid.uuid4().hex)
        assert token
        life.writer.lead(token)

    async def drain(self, *, lose_answers: bool = False, repeat: bool = False) -> None:
        for life in self.lives:
            while (call := life.writer.next_call()) is not None:
                (outcome,) = await self.redis.apply([call])
                if lose_answers or repeat:
                    (again,) = await self.redis.apply([call])
                    assert again == ("dup", b"")
                    outcome = again if lose_answers else outcome
                    lose_answers = False
                assert isinstance(outcome, tuple), outcome
                life.writer.settle(*outcome)

    async def mirror(self) -> None:
        while True:
            page = await self.redis.read_changes(self.position, 1)
            for entry_id, data in page.entries:
                assert entry_id == self.position + 1
                apply_changes(self.radix, data)
                self.position = entry_id
            if page.complete:
                return

    async def snapshot(self) -> RadixIndex:
        radix = RadixIndex(1_000_000)
        for holder_id, record in (await self.redis.snapshot()).holders.items():
            radix.add_holder(holder_id, holder_record(record))
        async for page in self.redis.nodes():
            for node_id, value in page:
                load_node(radix, node_id, value)
        return radix

    async def check(self, prompts: list[tuple[str, tuple[int, ...]]]) -> None:
        await self.mirror()
        copy = await self.snapshot()
        for size in {life.model.size for life in self.lives}:
            for salt, letters in prompts:
                packed = prompt_hashes(salt, letters, size)
                wanted = {
                    Holder(life.key.replica, 0, tier): matched * size // 16
                    for life in self.lives
                    if life.model.size == size
                    for tier in ("device", "host")
                    if (matched := life.model.match(tier, salt, letters))
                }
                mirrored = self.of_size(self.radix.match(packed), size)
                assert mirrored == wanted, (salt, letters)
                assert self.of_size(await self.redis.match(packed), size) == wanted
                assert self.of_size(copy.match(packed), size) == wanted

    def of_size(self, answer: dict[Holder, int], size: int) -> dict[Holder, int]:
        """Engines of another block size may share a shorter beginning; it is not what we ask."""
        sizes = {life.key.replica: life.model.size for life in self.lives}
        return {holder: n for holder, n in answer.items() if sizes[holder.replica] == size}


def prompt_hashes(salt: str, letters: tuple[int, ...], size: int) -> bytes:
    tokens = [token for letter in letters for token in block_tokens(letter, size)]
    return chain_packed(Root(MODEL, salt=salt).digest(), pack_tokens(tokens), 16)


KINDS = {
    "store": 30,
    "evict": 10,
    "offload": 6,
    "unload": 4,
    "drain": 25,
    "clear": 2,
    "restart": 2,
    "redeliver": 3,
    "lose": 3,
    "replay": 5,
    "repeat": 3,
    "lost answer": 2,
    "takeover": 3,
}


def a_prompt(rng: Random) -> Prefix:
    tail = tuple(rng.randrange(3) for _ in range(rng.randrange(4)))
    return rng.choice(SALTS), rng.choice(STEMS) + tail


def history(seed: int, length: int) -> list[tuple[str, int, Any, int]]:
    """Steps drawn with fixed weights; hypothesis' own lists are short and rarely get anywhere."""
    rng = Random(seed)
    steps: list[tuple[str, int, Any, int]] = []
    for kind in rng.choices(list(KINDS), list(KINDS.values()), k=length):
        which = rng.choice([0, 0, 1, 1, 2])
        match kind:
            case "store":
                steps.append((kind, which, a_prompt(rng), rng.choice([0, 1, 2, 5, 63, 64, 130])))
            case "unload":
                steps.append((kind, which, rng.randrange(300), rng.randrange(1, 9)))
            case _:
                steps.append((kind, which, rng.randrange(300), rng.randrange(1, 70)))
    return steps


def events_of(life: Life, kind: str, what: Any, much: int) -> list[dict[str, Any]]:
    model = life.model
    match kind:
        case "store":
            salt, letters = what
            # Where the beginning is not held, an engine computes and stores it too.
            start = max(
                n
                for n in range(min(much, len(letters)) + 1)
                if not n or model.device[salt, letters[:n]]
            )
            found = [model.store(salt, letters, start)]
        case "evict":
            found = [model.evict(what + i) for i in range(much)]
        case "offload":
            found = [model.offload(what, much)]
        case _:
            found = [model.drop_from_host(what + i) for i in range(much)]
    return [event for event in found if event is not None]


async def step(world: World, kind: str, which: int, what: Any, much: Any) -> None:
    life = world.lives[which]
    match kind:
        case "store" | "evict" | "offload" | "unload":
            if events := events_of(life, kind, what, much):
                life.take(life.state.live(life.batch(*events), 1.0))
        case "clear":
            life.take(life.state.live(life.batch(life.model.clear()), 1.0))
        case "restart":
            life.model.restart()
            life.seq, life.sent = 0, []
            life.take(life.state.connected(1.0))
        case "redeliver":
            for delivery in life.sent[-3:]:
                life.take(life.state.live(delivery, 1.0))
        case "lose":
            if (event := life.model.store("", (2, 2, 1), 0)) is not None:
                life.batch(event)
        case "replay":
            life.replay()
        case "takeover":
            await takeover(world, life)
        case _:
            await world.drain(lose_answers=kind == "lost answer", repeat=kind == "repeat")
            await world.mirror()


async def takeover(world: World, life: Life) -> None:
    """A new writer leads; what the old one still sends is fenced out."""
    old = life.writer
    old.add([])
    late = old.next_call()
    life.writer = SourceWriter(life.key, life.state.ledger)
    await world.lead(life)
    if late is not None:
        assert await world.redis.apply([late]) == [("fenced", b"")]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), length=st.integers(10, 60))
async def test_redis_and_mirror_agree_with_the_wire(server: Server, seed: int, length: int) -> None:
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=1_000_000, namespace=uuid.uuid4().hex
    )
    try:
        lives = [Life("r0", 16), Life("r1", 16), Life("r2", 48)]
        world = World(redis, RadixIndex(1_000_000), lives)
        for life in world.lives:
            await world.lead(life)
        steps = history(seed, length)
        for one in steps:
            await step(world, *one)
        for life in world.lives:
            # A batch that was lost on the wire shows at the next probe.
            life.state.connected(2.0)
            life.replay()
        await world.drain()
        stored = {what for kind, _, what, _ in steps if kind == "store"}
        rng = Random(seed + 1)
        await world.check([("", (2, 2, 1)), a_prompt(rng), a_prompt(rng), *sorted(stored)])
        await check_clean_after_all_is_gone(world)
    finally:
        await redis.close()


async def check_clean_after_all_is_gone(world: World) -> None:
    """When every source is gone for good, sweeping leaves no node behind."""
    for life in world.lives:
        await world.redis.forget(life.key, "test", life.writer.token)
    for _ in range(200):
        _, nodes, complete = await world.redis.sweep(100)
        if complete and not nodes:
            break
    await world.mirror()
    assert await world.redis.totals() == (0, 0)
    assert (world.radix.nodes, world.radix.units, world.radix.holders) == (0, 0, 0)


async def test_hashes_unpack_to_what_the_gateway_computes() -> None:
    packed = prompt_hashes("", (1, 2), 16)
    assert len(unpack_hashes(packed)) == 2
