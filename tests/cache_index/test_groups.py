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
from .publisher import MODEL
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
