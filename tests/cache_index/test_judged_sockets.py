"""A handful of the judge's histories through real sockets, two gateways and a real Valkey.

KVROUTE_TEST_JUDGED_SOCKETS is their number. At the end of each, and after each restart of an
engine, all claims must come right; then the gateway that writes is ended and one starts anew.
"""

from __future__ import annotations

import asyncio
import os
import uuid

import pytest
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex

from .judge.blocks import UNIT_TOKENS
from .judge.histories import history
from .socket_world import SocketWorld

HISTORIES = int(os.environ.get("KVROUTE_TEST_JUDGED_SOCKETS", "24"))
FIRST = int(os.environ.get("KVROUTE_TEST_JUDGED_FROM", "0"))
TRUST_LEASE_S = 1.0
pytestmark = pytest.mark.slow


def started(runner: asyncio.Runner, url: str, namespace: str) -> CacheIndex:
    async def start() -> CacheIndex:
        index = CacheIndex(
            redis_url=url,
            registry=CollectorRegistry(),
            base_unit_tokens=UNIT_TOKENS,
            trust_lease_s=TRUST_LEASE_S,
            namespace=namespace,
        )
        await index.start()
        return index

    return runner.run(start())


async def declared(index: CacheIndex, world: SocketWorld) -> None:
    index.set_sources(world.specs())


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
def test_real_publishers_are_never_believed_too_much(
    runner: asyncio.Runner, url: str, seed: int
) -> None:
    namespace = uuid.uuid4().hex
    indexes = [started(runner, url, namespace) for _ in range(2)]
    world = SocketWorld(history(seed), runner, indexes)
    try:
        for index in indexes:
            runner.run(declared(index, world))
        world.run()
        writer = max(indexes, key=lambda index: sum(each.leading for each in index.sources()))
        runner.run(writer.close())
        world.indexes[indexes.index(writer)] = started(runner, url, namespace)
        for index in world.indexes:
            runner.run(declared(index, world))
        world.settle()
        assert world.checked >= 2
    finally:
        world.close()
        for index in world.indexes:
            runner.run(index.close())
