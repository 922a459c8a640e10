"""A real vLLM whose publisher dials our bound socket, and what follows it there after its death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex, ModelIdentity, Root, Trust, chain_hashes, pack_tokens
from loadgen.engine.launch import MODEL
from router.engines import listed_publishers
from router.publishers import Bound, Owner, source_specs
from tests.cache_index.conftest import eventually
from tests.cache_index.test_lives import living, ports
from tests.engine.install import Engine
from tests.engine.replica import Replica, ReplicaOptions

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

PROMPT = list(range(1000, 1160))
IDENTITY = ModelIdentity(MODEL)
ROOT = Root(IDENTITY).digest()
TOPIC = "kv@real@smollm2"


async def test_a_real_engine_dials_is_followed_and_leaves_nothing_to_whoever_comes_next(
    engine: Engine, tmp_path: Path
) -> None:
    (port,) = ports(1)
    config = (
        '{"enable_kv_cache_events":true,"publisher":"zmq",'
        f'"endpoint":"tcp://127.0.0.1:{port}","topic":"{TOPIC}"}}'
    )
    options = ReplicaOptions(more={"kv-events-config": config})
    index = CacheIndex(redis_url=None, registry=CollectorRegistry(), trust_lease_s=2.0)
    await index.start()
    try:
        with Replica(engine, tmp_path, options, name="dialer") as replica:
            await asyncio.to_thread(replica.start)
            async with httpx.AsyncClient(base_url=replica.url, timeout=60) as client:
                listed = (await client.get("/kv_event_sources")).json()
                owner = Owner("real", "127.0.0.1", f"127.0.0.1:{replica.port}")
                bound = Bound(f"tcp://*:{port}")
                (spec,) = source_specs(owner, listed_publishers(listed), IDENTITY, bound)
                assert (spec.dials, spec.topic, spec.replay_endpoint) == (True, TOPIC, None)
                index.set_sources([spec])
                hashes = chain_hashes(ROOT, pack_tokens(PROMPT), 16)
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
                await eventually(lambda: index.listeners()[0].connections == 1)
                (await client.post("/v1/completions", json=body)).raise_for_status()
                await eventually(lambda: list(index.match(ROOT, hashes).values()) == [10])
                status = index.sources()[0]
                assert (status.trust, status.unit_tokens) == (Trust.EXACT, 32)
                # Idle for longer than its lease: its connection vouches for it.
                await asyncio.sleep(3.0)
                assert list(index.match(ROOT, hashes).values()) == [10]
            last = index.sources()[0].last_seq
            await asyncio.to_thread(replica.kill)
            # Somebody else goes on under its topic at once, with higher numbers.
            live = f"tcp://127.0.0.1:{port}"
            async with living("dial", live, "", 3, last + 1, 500.0, TOPIC):
                await eventually(lambda: index.sources()[0].last_seq > last)
                assert index.match(ROOT, hashes) == {}
                await asyncio.sleep(0.5)
                assert index.match(ROOT, hashes) == {}
                assert index.sources()[0].trust is not Trust.NONE
    finally:
        await index.close()
