"""CacheIndex end to end: real ZMQ publishers, a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex, Holder, Root, Trust, chain_hashes, pack_tokens
from cache_index.embedded import EmbeddedServer

from .conftest import eventually
from .publisher import CLEARED, MODEL, Publisher, as_array, removed, stored

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Root(MODEL).digest()
TOKENS = list(range(100, 164))
DEVICE = Holder("r0", 0, "device")


def prompt(tokens: list[int] = TOKENS, root: int = ROOT) -> list[int]:
    return chain_hashes(root, pack_tokens(tokens), 16)


@asynccontextmanager
async def running(url: str | None, namespace: str, **options: float) -> AsyncIterator[CacheIndex]:
    index = CacheIndex(redis_url=url, registry=CollectorRegistry(), namespace=namespace, **options)
    await index.start()
    try:
        yield index
    finally:
        await index.close()


@asynccontextmanager
async def publishing(**options: object) -> AsyncIterator[Publisher]:
    publisher = Publisher(**options)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        await publisher.close()


@pytest.mark.parametrize("with_topic", [True, False])
@pytest.mark.parametrize("encoded", [dict, as_array])
async def test_what_was_stored_before_and_after_start_is_matched(
    server: EmbeddedServer, namespace: str, with_topic: bool, encoded: type
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(with_topic=with_topic))
        await publisher.publish(encoded(stored([1, 2], TOKENS[:32])))
        index = await stack.enter_async_context(running(server.url, namespace))
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 2})
        await publisher.publish(encoded(stored([3, 4], TOKENS[32:], parent=2)))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 4})
        (status,) = index.sources()
        assert (status.trust, status.last_seq, status.unit_tokens) == (Trust.EXACT, 1, 16)
        await publisher.publish(encoded(removed([3])))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 2})
        await publisher.publish(encoded(CLEARED))
        await eventually(lambda: index.match(ROOT, prompt()) == {})
