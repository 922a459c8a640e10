"""CacheIndex end to end: real ZMQ publishers, a real Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from cache_index import CacheIndex, Holder, Root, SourceSpec, Trust, chain_hashes, pack_tokens
from cache_index.lifeline import supervised

from .conftest import Server, eventually
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
    server: Server, namespace: str, with_topic: bool, encoded: type
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


async def test_a_lost_batch_is_fetched_by_the_next_one(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        index = await stack.enter_async_context(running(server.url, namespace))
        index.set_sources([publisher.spec()])
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        await publisher.publish(stored([2], TOKENS[16:32], parent=1), lost=True)
        await publisher.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 3})
        assert index.sources()[0].trust is Trust.EXACT


async def test_a_lost_removal_is_found_by_the_idle_probe(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        index = await stack.enter_async_context(running(server.url, namespace, trust_lease_s=0.5))
        index.set_sources([publisher.spec()])
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        await publisher.publish(removed([1]), lost=True)
        await eventually(lambda: index.sources()[0].last_seq == 1, timeout_s=1.0)
        await eventually(lambda: index.match(ROOT, prompt()) == {})
        assert index.sources()[0].trust is Trust.EXACT


async def test_a_probe_that_waits_for_its_answer_holds_no_live_batch_back(
    server: Server, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        index = await stack.enter_async_context(running(server.url, namespace, trust_lease_s=4.0))
        index.set_sources([publisher.spec()])
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        await eventually(lambda: index.sources()[0].trust is Trust.EXACT)
        publisher.answering = False
        asked = index.sources()[0].counts["replay"]
        await eventually(lambda: index.sources()[0].counts["replay"] > asked)
        await publisher.publish(removed([1]))
        await eventually(lambda: index.match(ROOT, prompt()) == {})
        (status,) = index.sources()
        assert status.counts.get("replay_failed", 0) == 0
        assert status.trust is Trust.EXACT


async def test_an_engine_that_restarts_is_a_new_life(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(publishing())
        await old.publish(stored([1, 2], TOKENS[:32]))
        index = await stack.enter_async_context(running(server.url, namespace))
        index.set_sources([old.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 2})
        await old.close()
        new = await stack.enter_async_context(
            publishing(port=old.port, replay_port=old.replay_port)
        )
        await eventually(lambda: index.match(ROOT, prompt()) == {})
        await new.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        assert index.sources()[0].trust is Trust.EXACT


async def test_a_silent_source_is_left_out_and_comes_back(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        index = await stack.enter_async_context(running(server.url, namespace, trust_lease_s=0.3))
        index.set_sources([publisher.spec()])
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        publisher.answering = False
        await eventually(lambda: index.sources()[0].trust is Trust.NONE)
        assert index.available
        assert index.match(ROOT, prompt()) == {}
        publisher.answering = True
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})


async def test_a_source_without_replay_lives_on_its_connection(
    server: Server, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(replay=False))
        index = await stack.enter_async_context(running(server.url, namespace, trust_lease_s=0.3))
        index.set_sources([publisher.spec()])
        await publisher.subscribed()
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        assert index.sources()[0].trust is Trust.EXACT
        await asyncio.sleep(0.5)
        assert index.match(ROOT, prompt()) == {DEVICE: 1}
        await publisher.close()
        await eventually(lambda: index.match(ROOT, prompt()) == {})
        await eventually(lambda: index.sources()[0].trust is Trust.NONE)


async def test_malformed_messages_are_counted_and_survived(server: Server, namespace: str) -> None:
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        index = CacheIndex(redis_url=server.url, registry=registry, namespace=namespace)
        await index.start()
        stack.push_async_callback(index.close)
        index.set_sources([publisher.spec()])
        await publisher.subscribed()
        await publisher.send_raw(b"", b"short", b"\xc1")
        await publisher.send_raw(b"only one")
        await publisher.publish(stored([1], TOKENS[:16]))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        text = generate_latest(registry).decode()
        failures = 'kvroute_source_decode_failures_total{rank="0",'
        assert f'{failures}reason="sequence",replica="r0"}} 1.0' in text
        assert f'{failures}reason="frames",replica="r0"}} 1.0' in text
        assert 'kvroute_source_trust{rank="0",replica="r0"} 2.0' in text
        assert 'kvroute_index_matches_total{result="hit"}' in text
    assert "kvroute_" not in generate_latest(registry).decode()


async def test_a_source_that_is_no_longer_declared_is_gone(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1], TOKENS[:16]))
        index = await stack.enter_async_context(running(server.url, namespace))
        index.set_sources([publisher.spec()])
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})
        index.set_sources([])
        assert index.sources() == []
        assert index.match(ROOT, prompt()) == {}
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 1})


async def test_two_instances_on_one_redis_agree_and_the_standby_takes_over(
    server: Server, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1, 2], TOKENS[:32]))
        first = await stack.enter_async_context(running(server.url, namespace))
        second = await stack.enter_async_context(running(server.url, namespace))
        for index in (first, second):
            index.set_sources([publisher.spec()])
        for index in (first, second):
            await eventually(lambda i=index: i.match(ROOT, prompt()) == {DEVICE: 2})
        assert sorted(index.sources()[0].leading for index in (first, second)) == [False, True]
        leader, standby = (first, second) if first.sources()[0].leading else (second, first)
        await leader.close()
        await eventually(lambda: standby.sources()[0].leading)
        await publisher.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: standby.match(ROOT, prompt()) == {DEVICE: 3})


GATEWAY = """
import asyncio, json, sys
from prometheus_client import CollectorRegistry
from cache_index import CacheIndex, ModelIdentity, SourceSpec
async def main(url, namespace, endpoint, replay, *lease):
    leases = {"writer_lease_s": float(lease[0])} if lease else {}
    index = CacheIndex(
        redis_url=url, registry=CollectorRegistry(), namespace=namespace, **leases
    )
    await index.start()
    index.set_sources([SourceSpec("r0", 0, endpoint, replay, "", ModelIdentity("sim-model"))])
    while not index.sources()[0].leading:
        await asyncio.sleep(0.01)
    print("leading", flush=True)
    await asyncio.sleep(60)
asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def killed_while_it_leads(
    server: Server, namespace: str, *lease: float
) -> AsyncIterator[tuple[Publisher, CacheIndex]]:
    """A publisher, and a standby whose writer, another process, has just been killed."""
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1, 2], TOKENS[:32]))
        spec = publisher.spec()
        options = map(str, (server.url, namespace, spec.endpoint, spec.replay_endpoint, *lease))
        gateway = await asyncio.create_subprocess_exec(
            *supervised([sys.executable, "-c", GATEWAY, *options]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert gateway.stdout is not None
        assert await gateway.stdout.readline() == b"leading\n"
        leases = {"writer_lease_s": lease[0]} if lease else {}
        standby = await stack.enter_async_context(running(server.url, namespace, **leases))
        standby.set_sources([spec])
        await eventually(lambda: standby.match(ROOT, prompt()) == {DEVICE: 2})
        assert not standby.sources()[0].leading
        # Its supervisor ends it at once, without a chance to give the lease back.
        assert gateway.stdin is not None
        gateway.stdin.close()
        await gateway.wait()
        yield publisher, standby


async def test_a_writer_killed_is_replaced_within_its_lease(server: Server, namespace: str) -> None:
    async with killed_while_it_leads(server, namespace, 1.0) as (publisher, standby):
        await publisher.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: standby.match(ROOT, prompt()) == {DEVICE: 3}, timeout_s=5.0)
        assert standby.sources()[0].leading


async def test_what_a_dead_writer_left_is_believed_for_less_than_a_trust_lease(
    server: Server, namespace: str
) -> None:
    """With a lease as long as the trust lease, asked for once a second, it took up to six."""
    async with killed_while_it_leads(server, namespace) as (publisher, standby):
        client = Redis.from_url(server.url)
        leases = [key async for key in client.scan_iter(f"*{namespace}*l0:r0")]
        (left_ms,) = [await client.pttl(key) for key in leases]
        await client.aclose()
        assert 0 < left_ms <= 3000
        await publisher.publish(removed([2]))
        await eventually(lambda: standby.match(ROOT, prompt()) == {DEVICE: 1}, timeout_s=5.0)
        assert standby.sources()[0].trust is Trust.EXACT


async def test_redis_killed_and_restarted_is_filled_again() -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1, 2], TOKENS[:32]))
        index = await stack.enter_async_context(running(None, "embedded"))
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 2})
        embedded = index._embedded
        assert embedded is not None
        pid = int((embedded.folder / "valkey.log").read_text().split(":")[0])
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not index.available)
        assert index.match(ROOT, prompt()) == {}
        await publisher.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 3})
        folder = embedded.folder
    assert not folder.exists()


async def test_a_flushed_redis_is_filled_again(server: Server, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1, 2], TOKENS[:32]))
        index = await stack.enter_async_context(running(server.url, namespace))
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 2})
        client = Redis.from_url(server.url)
        await client.flushall()
        await client.execute_command("FUNCTION", "FLUSH")
        await client.aclose()
        await publisher.publish(stored([3], TOKENS[32:48], parent=2))
        await eventually(lambda: index.match(ROOT, prompt()) == {DEVICE: 3})


async def test_without_redis_everything_starts_answers_nothing_and_closes(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        await publisher.publish(stored([1], TOKENS[:16]))
        url = f"unix://{tmp_path}/nothing.sock"
        index = await stack.enter_async_context(running(url, "absent"))
        index.set_sources([publisher.spec()])
        await eventually(lambda: index.sources()[0].trust is Trust.EXACT)
        assert not index.available
        assert index.match(ROOT, prompt()) == {}


async def test_a_wrong_endpoint_is_a_reason_and_nothing_more(
    server: Server, namespace: str
) -> None:
    async with running(server.url, namespace) as index:
        index.set_sources([SourceSpec("r0", 0, "nonsense://x", None, "", MODEL)])
        await eventually(lambda: "nonsense" in index.sources()[0].reason)
        assert index.sources()[0].trust is Trust.NONE
        await eventually(lambda: index.available)


async def test_closing_is_prompt_whatever_is_under_way(server: Server, namespace: str) -> None:
    async with publishing() as publisher:
        for _ in range(8):
            async with asyncio.timeout(3):
                async with running(server.url, namespace) as index:
                    index.set_sources([publisher.spec()])
                    await publisher.publish(CLEARED)
                    index.set_sources([])
                    index.set_sources([publisher.spec()])
                    await eventually(lambda: index.sources()[0].trust is Trust.EXACT)
