"""Publishers that dial our bound socket: real sockets, told apart by topic."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import zmq
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex, Holder, Root, SourceSpec, Trust, chain_hashes, pack_tokens

from .conftest import Server, eventually
from .publisher import MODEL, Publisher, removed, stored

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Root(MODEL).digest()
TOKENS = list(range(100, 164))


def prompt() -> list[int]:
    return chain_hashes(ROOT, pack_tokens(TOKENS), 16)


def holder(replica: str) -> Holder:
    return Holder(replica, 0, "device")


@pytest.fixture
def address() -> Iterator[str]:
    """A free port of ours, for a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"


@asynccontextmanager
async def listening(
    server: Server, namespace: str, listen: str | None = None, lease_s: float = 5.0
) -> AsyncIterator[CacheIndex]:
    index = CacheIndex(
        redis_url=server.url,
        registry=CollectorRegistry(),
        namespace=namespace,
        trust_lease_s=lease_s,
        listen=listen,
    )
    await index.start()
    try:
        yield index
    finally:
        await index.close()


@asynccontextmanager
async def dialing(address: str, topic: str, *, replay: bool = False) -> AsyncIterator[Publisher]:
    publisher = Publisher(dial=address, topic=topic, replay=replay)
    try:
        yield publisher
    finally:
        await publisher.close()


async def test_many_dial_one_socket_and_are_told_apart_by_topic(
    server: Server, namespace: str, address: str
) -> None:
    topics = {"a": "a", "b": "kv@10.0.0.7:8000@llama", "c": "kv@c@org/llama@v2", "d": "own/topic"}
    names = {"a": ("a",), "b": ("b", "10.0.0.7:8000"), "c": ("c",), "d": ()}
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace))
        engines = {
            name: await stack.enter_async_context(dialing(address, topic))
            for name, topic in topics.items()
        }
        index.set_sources(
            [
                replace(
                    engine.spec(name),
                    topic=engine.topic if name == "d" else "",
                    names=names[name],
                )
                for name, engine in engines.items()
            ]
        )
        for at, (name, engine) in enumerate(engines.items()):
            await engine.subscribed()
            await engine.publish(stored([1, 2, 3, 4], TOKENS))
            await eventually(lambda at=at: len(index.match(ROOT, prompt())) == at + 1)
            assert index.match(ROOT, prompt())[holder(name)] == 4
        assert {each.trust for each in index.sources()} == {Trust.EXACT}
        await engines["c"].publish(removed([2]))
        await eventually(lambda: index.match(ROOT, prompt())[holder("c")] == 1)
        (listener,) = index.listeners()
        assert (listener.bound, listener.connections, listener.topics) == (True, 4, 4)
        assert listener.unknown == {}


async def test_unknown_topics_are_counted_and_shown_but_not_without_bound(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace, listen=address))
        stranger = await stack.enter_async_context(dialing(address, "gpu-8"))
        await stranger.subscribed()
        for number in range(100):
            topic = b"gpu-8" if number < 50 else b"t%d" % number + b"x" * 500
            await stranger.send_raw(topic, bytes(8), b"\x90")
        await eventually(lambda: index.listeners()[0].counts.get("unknown_topic") == 100)
        (listener,) = index.listeners()
        assert listener.unknown["gpu-8"] == 50
        assert len(listener.unknown) == 32
        assert max(map(len, listener.unknown)) <= 120
        # Declared now: what it says from now on is taken, and it is unknown no more.
        index.set_sources([replace(stranger.spec("gpu-7"), names=("gpu-8",), topic="")])
        await stranger.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("gpu-7"): 1})
        assert "gpu-8" not in index.listeners()[0].unknown


async def test_two_sources_that_claim_one_name_get_nothing(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace))
        engine = await stack.enter_async_context(dialing(address, "kv@10.0.0.7@m"))
        spec = replace(engine.spec("a"), topic="", names=("10.0.0.7",))
        index.set_sources([spec, replace(spec, replica="b")])
        await engine.subscribed()
        await engine.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.listeners()[0].unknown == {"kv@10.0.0.7@m": 1})
        assert index.match(ROOT, prompt()) == {}


async def test_two_publishers_under_one_topic_are_believed_neither(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace))
        first = await stack.enter_async_context(dialing(address, "a"))
        index.set_sources([first.spec("a")])
        await first.subscribed()
        await first.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 1})
        async with dialing(address, "a") as second:
            await second.subscribed()
            # It continues the sequence, so that nothing but the connection gives it away.
            second.seq = 1
            await second.publish(stored([2], TOKENS[16:32], parent=1))
            await eventually(lambda: "2 publishers" in index.sources()[0].reason)
            assert index.sources()[0].trust is Trust.NONE
            assert "127.0.0.1" in index.sources()[0].reason
            await first.publish(stored([3], TOKENS[32:48], parent=2))
            await asyncio.sleep(0.1)
            assert index.match(ROOT, prompt()) == {}
        # The second one is gone: the first one is believed again, from here on.
        await eventually(lambda: "2 publishers" not in index.sources()[0].reason)
        await first.publish(stored([4], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 1})
        assert index.sources()[0].trust is Trust.PARTIAL


@pytest.mark.parametrize("new_seq", [0, 1, 2, 3, 7])
async def test_a_restart_without_replay_leaves_nothing_whatever_comes_next(
    server: Server, namespace: str, address: str, new_seq: int
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace))
        old = await stack.enter_async_context(dialing(address, "a"))
        index.set_sources([old.spec("a")])
        await old.subscribed()
        await old.publish(stored([1], TOKENS[:16]))
        await old.publish(stored([2], TOKENS[16:32], parent=1))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 2})
        await old.close()
        # The end of the connection is the end of trust, before the next life has said a word.
        await eventually(lambda: index.match(ROOT, prompt()) == {})
        assert "connection is gone" in index.sources()[0].reason
        new = await stack.enter_async_context(dialing(address, "a"))
        await new.subscribed()
        new.seq = new_seq
        await new.publish(stored([9], [7] * 16))
        await eventually(lambda: index.sources()[0].last_seq == new_seq)
        await asyncio.sleep(0.05)
        assert index.match(ROOT, prompt()) == {}
        assert index.sources()[0].trust is (Trust.EXACT if new_seq == 0 else Trust.PARTIAL)


async def test_an_idle_publisher_lives_on_its_connection(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace, lease_s=0.3))
        engine = await stack.enter_async_context(dialing(address, "a"))
        index.set_sources([engine.spec("a")])
        await engine.subscribed()
        await engine.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 1})
        await asyncio.sleep(0.6)
        assert index.match(ROOT, prompt()) == {holder("a"): 1}
        assert index.sources()[0].trust is Trust.EXACT


async def test_with_a_replay_endpoint_a_reconnect_loses_nothing(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(dialing(address, "a", replay=True))
        await engine.publish(stored([1], TOKENS[:16]))
        index = await stack.enter_async_context(listening(server, namespace))
        index.set_sources([engine.spec("a")])
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 1})
        await engine.subscribed()
        await engine.publish(stored([2], TOKENS[16:32], parent=1))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 2})
        # The listener goes and comes; the publisher dials again by itself.
        index.set_sources([])
        index.set_sources([engine.spec("a")])
        await engine.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 3})
        assert index.sources()[0].trust is Trust.EXACT


async def test_an_address_that_is_taken_is_a_reason_and_tried_again(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        other = context.socket(zmq.PUB)
        other.bind(address)
        index = await stack.enter_async_context(listening(server, namespace))
        index.set_sources([SourceSpec("a", 0, address, None, "a", MODEL, dials=True)])
        await eventually(lambda: "cannot be bound" in index.sources()[0].reason)
        other.close(linger=0)
        await eventually(lambda: index.listeners()[0].bound)
        assert "cannot be bound" not in index.sources()[0].reason


async def test_nonsense_over_a_bound_socket_stops_nobody(
    server: Server, namespace: str, address: str
) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(listening(server, namespace))
        engine = await stack.enter_async_context(dialing(address, "a"))
        index.set_sources([engine.spec("a")])
        await engine.subscribed()
        for frames in ([b""], [b"a"], [b"a", b"short", b"x"], [b"\xff\xfe", b"", b""]):
            await engine.send_raw(*frames)
        await engine.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {holder("a"): 1})
        assert index.sources()[0].malformed == {"frames": 1, "sequence": 1}
