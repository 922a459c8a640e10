"""How fast and how big the index is: match, ingest, memory. One process, one embedded Valkey.

    python benchmarks/index.py --units 1000000

Chains are conversations of 2,048 units that share a beginning with others (every fourth starts a
tree of its own), each held by two of eight sources. Ingest goes the whole way from wire payloads
to Redis without sockets: decode, state machine, writer, function call. Not measured: ZMQ, and the
mirror's share while it follows (it is filled from a snapshot here).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import time
import tracemalloc
import uuid
from typing import Any

import msgspec
from redis.asyncio import Redis

from cache_index.blocks import chain_packed, pack_tokens
from cache_index.changes import holder_record, load_node
from cache_index.embedded import EmbeddedServer
from cache_index.events import decode_batch, payload_digest
from cache_index.identity import ModelIdentity, Root
from cache_index.radix import RadixIndex
from cache_index.redis_index import RedisIndex
from cache_index.source import Delivery, SourceState
from cache_index.types import SourceKey
from cache_index.writer import SourceWriter

MODEL = ModelIdentity("bench")
UNIT_TOKENS = 16
PROMPT_UNITS = 2048
BLOCKS_PER_EVENT = 128
EVENTS_PER_BATCH = 4
SOURCES = 8


class Source:
    """A publisher's state machine and writer, fed with wire payloads."""

    def __init__(self, number: int) -> None:
        self.key = SourceKey(f"replica-{number}", 0)
        self.state = SourceState(MODEL, base_unit_tokens=16, lease_s=5.0, replayable=True)
        self.state.begin_replay()
        self.state.end_replay(0.0, 0.0)
        self.writer = SourceWriter(self.key, self.state.ledger)
        self.seq = 0

    def take(self, payload: bytes) -> None:
        delivery = Delivery(self.seq, payload_digest(payload), decode_batch(payload))
        self.seq += 1
        self.writer.add(self.state.live(delivery, 0.0))


def conversations(count: int, rng: random.Random) -> list[list[int]]:
    """Token ids of `count` prompts of 2,048 units; most begin like an earlier one."""
    prompts: list[list[int]] = []
    tokens = PROMPT_UNITS * UNIT_TOKENS
    for number in range(count):
        shared = [] if number % 4 == 0 else prompts[-1][: rng.randrange(1, 512) * UNIT_TOKENS]
        fresh = tokens - len(shared)
        prompts.append(shared + [rng.randrange(150_000) for _ in range(fresh)])
    return prompts


def engine_hashes(tokens: list[int]) -> list[int]:
    packed = chain_packed(7, pack_tokens(tokens), UNIT_TOKENS)
    return list(memoryview(packed).cast("Q"))


def store_payloads(tokens: list[int]) -> list[bytes]:
    """The prompt as an engine announces it: chunks, a few events a batch."""
    hashes = engine_hashes(tokens)
    events: list[dict[str, Any]] = []
    for at in range(0, len(hashes), BLOCKS_PER_EVENT):
        chunk = hashes[at : at + BLOCKS_PER_EVENT]
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": chunk,
                "parent_block_hash": hashes[at - 1] if at else None,
                "token_ids": tokens[at * UNIT_TOKENS : (at + len(chunk)) * UNIT_TOKENS],
                "block_size": UNIT_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        )
    return batches(events)


def removal_payloads(tokens: list[int]) -> list[bytes]:
    """Evicted from the end, one block an event, as engines do it."""
    events = [
        {"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU"}
        for h in reversed(engine_hashes(tokens))
    ]
    return batches(events, 64)


def batches(events: list[dict[str, Any]], size: int = EVENTS_PER_BATCH) -> list[bytes]:
    return [
        msgspec.msgpack.encode([float(at), events[at : at + size], 0])
        for at in range(0, len(events), size)
    ]


async def drain(redis: RedisIndex, sources: list[Source]) -> None:
    while True:
        pairs = [(s.writer, call) for s in sources if (call := s.writer.next_call()) is not None]
        if not pairs:
            return
        outcomes = await redis.apply([call for _, call in pairs])
        for (writer, _), outcome in zip(pairs, outcomes, strict=True):
            assert isinstance(outcome, tuple), outcome
            writer.settle(*outcome)


async def cpu_s(client: Any) -> float:
    """CPU seconds of this process and of the server."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    info = await client.info("cpu")
    return own.ru_utime + own.ru_stime + info["used_cpu_user"] + info["used_cpu_sys"]


async def ingest(
    redis: RedisIndex, client: Any, sources: list[Source], work: list[tuple[Source, bytes]]
) -> tuple[float, float]:
    """Wall and CPU seconds."""
    cpu, wall = await cpu_s(client), time.perf_counter()
    for number, (source, payload) in enumerate(work):
        source.take(payload)
        if number % 16 == 15:
            await drain(redis, sources)
    await drain(redis, sources)
    return time.perf_counter() - wall, await cpu_s(client) - cpu


async def mirror_of(redis: RedisIndex, max_units: int) -> RadixIndex:
    radix = RadixIndex(max_units)
    for holder_id, record in (await redis.snapshot()).holders.items():
        radix.add_holder(holder_id, holder_record(record))
    async for page in redis.nodes():
        for node_id, value in page:
            load_node(radix, node_id, value)
    return radix


def per_match_us(radix: RadixIndex, prompts: list[bytes]) -> list[float]:
    times = []
    for packed in prompts:
        start = time.perf_counter()
        answer = radix.match(packed)
        times.append((time.perf_counter() - start) * 1e6)
        assert max(answer.values()) == PROMPT_UNITS
    return times


async def main(units: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    server = EmbeddedServer()
    await server.ensure()
    redis = RedisIndex(
        server.url, base_unit_tokens=16, max_units=100_000_000, namespace=uuid.uuid4().hex
    )
    client: Any = Redis.from_url(server.url, protocol=2)
    result: dict[str, Any] = {}
    try:
        sources = [Source(number) for number in range(SOURCES)]
        for source in sources:
            token, _ = await redis.acquire(source.key, "bench", 10_000_000, "g")
            source.writer.lead(token)
        await drain(redis, sources)
        empty_bytes = (await client.info("memory"))["used_memory"]
        wall_s = cpu = 0.0
        stored = 0
        packed: list[bytes] = []
        root = Root(MODEL).digest()
        recent: list[list[int]] = []
        while (await redis.totals())[0] < units:
            prompts = conversations(16, rng)
            work = [
                (sources[(number + copy) % SOURCES], payload)
                for number, tokens in enumerate(prompts)
                for copy in (0, 3)
                for payload in store_payloads(tokens)
            ]
            took = await ingest(redis, client, sources, work)
            wall_s, cpu = wall_s + took[0], cpu + took[1]
            stored += 2 * len(prompts) * PROMPT_UNITS
            packed += [chain_packed(root, pack_tokens(tokens), UNIT_TOKENS) for tokens in prompts]
            recent = prompts
        distinct, nodes = await redis.totals()
        memory = (await client.info("memory"))["used_memory"] - empty_bytes
        result |= {
            "distinct_units": distinct,
            "nodes": nodes,
            "store_units_per_s": round(stored / wall_s),
            "store_units_per_cpu_s": round(stored / cpu),
            "redis_bytes_per_unit": round(memory / distinct, 1),
        }
        started = time.perf_counter()
        await mirror_of(redis, 100_000_000)
        result["snapshot_s"] = round(time.perf_counter() - started, 2)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        radix = await mirror_of(redis, 100_000_000)
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        result["mirror_bytes_per_unit"] = round(held / distinct, 1)
        asked = rng.sample(packed, min(400, len(packed)))
        times = per_match_us(radix, asked)
        result["match_us_median"] = round(statistics.median(times), 1)
        result["match_us_p99"] = round(sorted(times)[int(len(times) * 0.99)], 1)
        by_redis = []
        for one in asked:
            started = time.perf_counter()
            await redis.match(one)
            by_redis.append((time.perf_counter() - started) * 1e6)
        result["match_by_redis_us_median"] = round(statistics.median(by_redis), 1)
        work = [
            (sources[(number + copy) % SOURCES], payload)
            for number, tokens in enumerate(recent)
            for copy in (0, 3)
            for payload in removal_payloads(tokens)
        ]
        wall_s, cpu = await ingest(redis, client, sources, work)
        gone = 2 * len(recent) * PROMPT_UNITS
        result["removed_units_per_s"] = round(gone / wall_s)
        result["removed_units_per_cpu_s"] = round(gone / cpu)
        result["mixed_units_per_cpu_s"] = round(
            2 / (1 / result["store_units_per_cpu_s"] + 1 / result["removed_units_per_cpu_s"])
        )
    finally:
        await client.aclose()
        await redis.close()
        await server.close()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(main(options.units, options.seed)), indent=2))
