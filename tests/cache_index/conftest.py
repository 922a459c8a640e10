"""Servers and waiting, shared by the index's tests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from cache_index.embedded import EmbeddedServer


@dataclass(frozen=True)
class Server:
    url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    """One Valkey for a module; tests keep apart by namespace.

    KVROUTE_TEST_REDIS_URL names another server to test against. Its data is flushed.
    """
    if url := os.environ.get("KVROUTE_TEST_REDIS_URL"):
        yield Server(url)
        return
    embedded = EmbeddedServer()
    await embedded.ensure()
    yield Server(embedded.url)
    await embedded.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The loop of a module whose tests are not coroutines."""
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def url(runner: asyncio.Runner) -> Iterator[str]:
    """A Valkey of that module's own."""
    server = EmbeddedServer()
    runner.run(server.ensure())
    yield server.url
    runner.run(server.close())


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return f"test-{abs(hash(request.node.nodeid))}"


async def eventually(check: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `check` holds; what it says last is in the failure."""
    end_s = time.monotonic() + timeout_s
    while not (last := check()):
        assert time.monotonic() < end_s, f"still {last!r} after {timeout_s} s"
        await asyncio.sleep(0.01)
