"""Publishers killed and started again within a second, on the same ports and at a higher rate.

The new life repeats hashes and sequence numbers, and soon has more of both, so that it looks like
the old one with a gap. No block of an old life may be credited beside one of a newer life.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import ExitStack, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex, Root, SourceSpec, Trust, chain_hashes, pack_tokens

from .conftest import Server, eventually
from .lives import HOLDS, tokens
from .publisher import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Root(MODEL).digest()
LIVES = 8
LEASE_S = 2.0


def ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@asynccontextmanager
async def living(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """One life of the publisher; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{__package__}.lives", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        await process.wait()


class Watch:
    """Looks again and again which lives are credited with anything."""

    def __init__(self, index: CacheIndex) -> None:
        self._index = index
        self._asked = {
            life: [
                chain_hashes(ROOT, pack_tokens(tokens(life, block)), 16)
                for block in range(0, HOLDS, 7)
            ]
            for life in range(LIVES)
        }

    def credited(self) -> set[int]:
        return {
            life
            for life, prompts in self._asked.items()
            if any(self._index.match(ROOT, prompt) for prompt in prompts)
        }

    async def until(self, life: int) -> None:
        """Until this life is seen; never beside an older one."""

        def alone() -> bool:
            seen = self.credited()
            assert seen <= {life - 1} or seen == {life}, seen
            return seen == {life}

        await eventually(alone, timeout_s=20.0)

    async def keeps(self, allowed: Collection[int], seconds: float) -> None:
        end_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end_s:
            assert self.credited() <= set(allowed)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
@pytest.mark.parametrize("style", ["bind", "dial"])
async def test_nothing_of_an_old_life_survives_a_fast_restart(
    server: Server, namespace: str, style: str, replay: bool
) -> None:
    live, again = (f"tcp://127.0.0.1:{port}" for port in ports(2))
    spec = SourceSpec("r0", 0, live, again if replay else None, "a", MODEL, dials=style == "dial")
    index = CacheIndex(
        redis_url=server.url,
        registry=CollectorRegistry(),
        namespace=namespace,
        trust_lease_s=LEASE_S,
    )
    await index.start()
    try:
        index.set_sources([spec])
        watch = Watch(index)
        for life in range(LIVES):
            # Each life is faster than the one before, and begins with more than it ever sent.
            burst, rate = (0, 200) if life % 2 == 0 else (150 * life, 400 * life)
            async with living(style, live, again if replay else "", life, burst, rate):
                await watch.until(life)
                await watch.keeps({life}, 0.3)
                await eventually(lambda: index.sources()[0].trust is not Trust.NONE)
        # The last one is dead: it is believed for one lease at the most.
        # (A copy of the index that lags, as on a busy machine, credits nothing either.)
        await eventually(
            lambda: not watch.credited() and index.sources()[0].trust is Trust.NONE,
            timeout_s=LEASE_S + 1.0,
        )
        status = index.sources()[0]
        assert status.epoch >= LIVES - 1
    finally:
        await index.close()
