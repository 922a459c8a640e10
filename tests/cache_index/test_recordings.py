"""Recorded engines, replayed through the whole way: what their own hashes say must come out."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import msgspec
import pytest

from cache_index import Holder, Root, chain_packed, pack_tokens
from cache_index.events import decode_batch, decode_seq, payload_digest
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.source import Delivery

from .captures import NAMES, messages
from .conftest import Server
from .publisher import MODEL
from .test_histories import Life, World

pytestmark = pytest.mark.asyncio(loop_scope="module")

Chain = tuple[str, list[Any], list[int]]  # salt, the engine's hashes from the start, tokens


class EngineView:
    """What the engine's own hashes and parents say, read straight from the maps on the wire."""

    def __init__(self) -> None:
        self.chains: dict[Any, Chain] = {}
        self.device: Counter[Any] = Counter()
        self.pool: set[Any] = set()
        self.salted = False

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            on_device = event.get("medium") == "GPU"
            match event["type"]:
                case "BlockStored" if on_device:
                    self._store(event)
                case "BlockStored":
                    nameless = "group_idx" not in event
                    held = set(event["block_hashes"]) & (+self.device).keys()
                    self.pool |= set() if nameless and self.salted else held
                case "BlockRemoved" if on_device:
                    self.device.subtract(event["block_hashes"])
                case "BlockRemoved":
                    self.pool -= set(event["block_hashes"])
                case _:
                    self.device.clear()
                    self.pool.clear()

    def _store(self, event: dict[str, Any]) -> None:
        size = event["block_size"]
        parent = event["parent_block_hash"]
        keys = event["extra_keys"][0]
        self.salted |= bool(keys)
        salt, hashes, tokens = self.chains[parent] if parent else ((keys or [""])[0], [], [])
        for i, name in enumerate(event["block_hashes"]):
            hashes = [*hashes, name]
            tokens = tokens + event["token_ids"][i * size : (i + 1) * size]
            self.chains[name] = (salt, hashes, tokens)
            self.device[name] += 1

    def expected(self, hashes: list[Any], held: Any) -> int:
        """Base units (engine blocks are 32 or 128 tokens) of a chain held from its start."""
        matched = next((i for i, name in enumerate(hashes) if name not in held), len(hashes))
        return matched * len(self.chains[hashes[0]][2]) // 16


@pytest.mark.parametrize("name", [name for name in NAMES if name != "replay"])
async def test_a_recording_is_indexed_as_its_engine_meant_it(server: Server, name: str) -> None:
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=1_000_000, namespace=uuid.uuid4().hex
    )
    try:
        life = Life("r0", 32)
        world = World(redis, RadixIndex(1_000_000), [life])
        await world.lead(life)
        view = EngineView()
        lives = 0
        checked = reused = 0
        for _, seq_frame, payload in messages(name):
            seq = decode_seq(seq_frame)
            if seq == 0 and lives:
                view = EngineView()
            lives += seq == 0
            reused += continued(life, world.radix, view, payload)
            view.take(payload)
            batch = Delivery(seq, payload_digest(payload), decode_batch(payload))
            life.take(life.state.live(batch, 1.0))
            await world.drain()
            await world.mirror()
            checked += await compare(world, view)
        assert checked
        assert reused or name == "lmcache_driven_salted_A"
        assert life.state.life == lives - 1
        assert not life.state.ledger.counts["orphaned"]
    finally:
        await redis.close()


def continued(life: Life, radix: RadixIndex, view: EngineView, payload: bytes) -> int:
    """Chains that an engine went on from: it had all of them, and the index must have said so.

    A store with a parent of an earlier batch shows what the engine reused, or had just computed.
    """
    count = 0
    known = +view.device
    for event in msgspec.msgpack.decode(payload)[1]:
        if event["type"] == "AllBlocksCleared":
            break
        parent = event.get("parent_block_hash")
        if event["type"] == "BlockStored" and event["medium"] == "GPU" and parent in known:
            salt, hashes, tokens = view.chains[parent]
            packed = chain_packed(Root(MODEL, salt=salt).digest(), pack_tokens(tokens), 16)
            whole = len(tokens) // 16
            assert radix.match(packed).get(Holder("r0", 0, "device")) == whole, len(hashes)
            count += 1
    return count


async def compare(world: World, view: EngineView) -> int:
    """Check the longest chains, the salted ones and some in between; returns hits."""
    hits = 0
    some = sorted(view.chains.items(), key=lambda item: len(item[1][1]))[
        :: max(1, len(view.chains) // 8)
    ]
    for _, (salt, hashes, tokens) in some:
        for asked in {salt, "", "a-stranger"}:
            packed = chain_packed(Root(MODEL, salt=asked).digest(), pack_tokens(tokens), 16)
            answer = world.radix.match(packed)
            assert answer == await world.redis.match(packed)
            if asked == salt:
                wanted = {
                    Holder("r0", 0, tier): units
                    for tier, held in (("device", +view.device), ("host", view.pool))
                    if (units := view.expected(hashes, held))
                }
                assert answer == wanted
                hits += len(answer)
            elif asked == "a-stranger":
                assert answer == {}
    return hits


async def test_salted_blocks_that_lmcache_announces_unsalted_are_no_credit(
    server: Server,
) -> None:
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=1_000_000, namespace=uuid.uuid4().hex
    )
    try:
        life = Life("r0", 32)
        world = World(redis, RadixIndex(1_000_000), [life])
        await world.lead(life)
        answers = []
        for _, seq_frame, payload in messages("lmcache_driven_salted_A"):
            first = msgspec.msgpack.decode(payload)[1][0]
            if not answers:
                tokens = pack_tokens(first["token_ids"])
            batch = Delivery(decode_seq(seq_frame), payload_digest(payload), decode_batch(payload))
            life.take(life.state.live(batch, 1.0))
            await world.drain()
            await world.mirror()
            packed = chain_packed(Root(MODEL).digest(), tokens, 16)
            answers.append(world.radix.match(packed))
        unsalted = {Holder("r0", 0, "device"): 8}
        assert answers == [{}, {}, unsalted, unsalted]
    finally:
        await redis.close()
