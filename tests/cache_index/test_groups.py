"""Hybrid models: what vLLM's own cache manager would reuse, against what the index says."""

from __future__ import annotations

import lzma
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_index import Holder, Root, chain_packed, pack_tokens
from cache_index.events import decode_batch, payload_digest
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.source import Delivery
from cache_index.types import Trust

from .conftest import Server
from .publisher import MODEL, stored
from .test_histories import Life, World

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parent / "captures" / "groups"
NAMES = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.xz"))
DEVICE = Holder("r0", 0, "device")


def values(name: str) -> Iterator[Any]:
    unpacker = msgspec.msgpack.Decoder()
    data = lzma.decompress((FOLDER / f"{name}.msgpack.xz").read_bytes())
    return iter(unpacker.decode(data))


def packed(tokens: list[int], salt: str) -> bytes:
    # An engine computes at least the last token.
    return chain_packed(Root(MODEL, salt=salt).digest(), pack_tokens(tokens[:-1]), 16)


# Tokens of hits that the index leaves unsaid, in a thousand: the chunk of chunked local attention
# is not on the wire. Everything else is said exactly.
UNSAID = {"chunked": 550}


@pytest.mark.parametrize("name", NAMES)
async def test_the_index_says_what_the_cache_manager_would_reuse(server: Server, name: str) -> None:
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=1_000_000, namespace=uuid.uuid4().hex
    )
    try:
        life = Life("r0", 16)
        world = World(redis, RadixIndex(1_000_000), [life])
        await world.lead(life)
        said = reused = 0
        changed = False
        for value in values(name):
            if isinstance(value, bytes):
                batch = Delivery(life.seq, payload_digest(value), decode_batch(value))
                life.seq += 1
                life.take(life.state.live(batch, 1.0))
                changed = True
                continue
            if changed:
                await world.drain()
                await world.mirror()
                changed = False
            tokens, salt, hit = value
            answer = world.radix.match(packed(tokens, salt))
            assert answer == await redis.match(packed(tokens, salt))
            found = answer.get(DEVICE, 0) * 16
            assert found <= hit, (salt, len(tokens))
            said, reused = said + found, reused + hit
        assert life.state.trust(1.0)[0] is Trust.EXACT
        assert 1000 * (reused - said) <= UNSAID.get(name, 0) * reused
    finally:
        await redis.close()


SHAPES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "dense, 16": (16, None),
    "dense, 48": (48, None),
    "with states, 32": (32, {"kv_cache_spec_kind": "mamba", "group_idx": 1}),
    "dense, 16 again": (16, None),
}


async def test_a_restart_may_bring_another_unit_and_other_groups_without_a_flush(
    server: Server,
) -> None:
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=1_000_000, namespace=uuid.uuid4().hex
    )
    try:
        life, other = Life("r0", 16), Life("r1", 16)
        world = World(redis, RadixIndex(1_000_000), [life, other])
        for each in world.lives:
            await world.lead(each)
        tokens = list(range(961))
        full = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
        other.take(other.state.live(other.batch(stored([9], tokens[:16], **full)), 1.0))
        for name, (size, state) in SHAPES.items():
            life.seq, life.sent = 0, []
            life.take(life.state.connected(1.0))
            blocks = [hash((name, i)) & 2**63 - 1 for i in range(480 // size)]
            events = [stored(blocks, tokens[:480], block_size=size, **full)]
            if state is not None:
                last = blocks[5:6]
                events.append(stored(last, tokens[: 6 * size], block_size=size, **state))
            life.batch(*events)
            life.replay()
            await world.drain()
            await world.mirror()
            wanted = {
                DEVICE: (480 if state is None else 6 * size) // 16,
                Holder("r1", 0, "device"): 1,
            }
            asked = packed(tokens, "")
            assert world.radix.match(asked) == wanted, name
            assert await redis.match(asked) == wanted, name
            assert (await world.snapshot()).match(asked) == wanted, name
            assert life.state.ledger.block_tokens == size
            assert life.state.trust(1.0)[0] is Trust.EXACT
    finally:
        await redis.close()
