"""The functions inside Redis, one at a time: leases, fences, bounds, sweeping, the mirror."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cache_index import Holder, IndexUnavailable, Root, chain_packed, pack_tokens
from cache_index.events import decode_batch
from cache_index.ledger import Operation
from cache_index.mirror import Mirror
from cache_index.redis_index import RedisIndex
from cache_index.types import SourceKey
from cache_index.writer import SourceWriter

from .conftest import Server, eventually
from .publisher import CLEARED, MODEL, encode, removed, stored
from .test_histories import Life

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = SourceKey("r0", 0)
HOLDER = Holder("r0", 0, "device")


def tokens_of(units: int, start: int = 0) -> list[int]:
    return list(range(start, start + units * 16))


def packed_of(units: int, start: int = 0) -> bytes:
    return chain_packed(Root(MODEL).digest(), pack_tokens(tokens_of(units, start)), 16)


def index_on(url: str, max_units: int = 100_000) -> RedisIndex:
    return RedisIndex(url, base_unit_tokens=16, max_units=max_units, namespace=uuid.uuid4().hex)


@pytest_asyncio.fixture(loop_scope="module")
async def redis(server: Server) -> AsyncIterator[RedisIndex]:
    index = index_on(server.url)
    yield index
    await index.close()


def events(life: Life, *what: dict[str, object]) -> list[Operation]:
    out: list[Operation] = []
    life.state.ledger.apply(decode_batch(encode(what)).events, out)
    life.writer.add(out)
    return out


async def lead(redis: RedisIndex, life: Life, owner: str = "me") -> None:
    token, _ = await redis.acquire(life.key, owner, 60_000, uuid.uuid4().hex)
    life.writer.lead(token)
    await drain(redis, life)


async def drain(redis: RedisIndex, life: Life) -> None:
    while (call := life.writer.next_call()) is not None:
        (outcome,) = await redis.apply([call])
        assert isinstance(outcome, tuple)
        life.writer.settle(*outcome)


async def test_a_lease_has_one_owner_until_it_runs_out(redis: RedisIndex) -> None:
    first, _ = await redis.acquire(KEY, "a", 200, "g")
    assert first
    taken, left_ms = await redis.acquire(KEY, "b", 200, "g")
    assert taken == 0 and 0 < left_ms <= 200
    assert await redis.renew(KEY, "a", 200, first)
    assert not await redis.renew(KEY, "b", 200, first)
    second = 0
    async with asyncio.timeout(2):
        while not second:
            second, _ = await redis.acquire(KEY, "b", 60_000, "g")
    assert second > first
    assert not await redis.renew(KEY, "a", 200, first)
    await redis.release(KEY, "a")
    assert await redis.renew(KEY, "b", 60_000, second)
    await redis.release(KEY, "b")
    third, _ = await redis.acquire(KEY, "c", 60_000, "g")
    assert third > second


async def test_a_writer_that_lost_its_lease_changes_nothing(redis: RedisIndex) -> None:
    old, new = Life("r0", 16), Life("r0", 16)
    await lead(redis, old, "a")
    events(old, stored([1, 2], tokens_of(2)))
    await drain(redis, old)
    events(old, stored([3], tokens_of(1, 64)))
    late = old.writer.next_call()
    assert late is not None
    await redis.release(KEY, "a")
    await lead(redis, new, "b")
    assert await redis.apply([late]) == [("fenced", b"")]
    old.writer.settle("fenced", b"")
    assert old.writer.token == 0 and not old.writer.busy
    assert await redis.match(packed_of(1, 64)) == {}
    assert await redis.match(packed_of(2)) == {}


async def test_past_the_bound_new_units_are_refused_and_old_ones_stay(
    server: Server,
) -> None:
    redis = index_on(server.url, max_units=100)
    try:
        life = Life("r0", 16)
        await lead(redis, life)
        events(life, stored(range(100), tokens_of(100)))
        events(life, stored(range(500, 520), tokens_of(20, 100_000)))
        await drain(redis, life)
        assert await redis.totals() == (100, 2)
        assert await redis.match(packed_of(100)) == {HOLDER: 100}
        assert await redis.match(packed_of(20, 100_000)) == {}
        assert life.writer.counts["refused_units"] == 20
        events(life, removed(range(100)))
        events(life, stored(range(600, 620), tokens_of(20, 200_000)))
        await drain(redis, life)
        assert await redis.match(packed_of(20, 200_000)) == {HOLDER: 20}
        events(life, stored(range(700, 800), tokens_of(100)))
        await drain(redis, life)
        assert await redis.match(packed_of(100)) == {HOLDER: 80}
        await lead(redis, life)
        assert await redis.totals() == (100, 3)
        assert await redis.match(packed_of(20, 200_000)) == {HOLDER: 20}
        assert await redis.match(packed_of(100)) == {HOLDER: 80}
    finally:
        await redis.close()


async def test_a_parent_that_is_gone_from_redis_is_built_again(
    server: Server, redis: RedisIndex
) -> None:
    life = Life("r0", 16)
    await lead(redis, life)
    events(life, stored(range(70), tokens_of(70)))
    await drain(redis, life)
    client = Redis.from_url(server.url)
    packed = packed_of(70)
    await client.delete(redis.keys.nodes + packed[64 * 8 : 65 * 8])
    await client.aclose()
    events(life, stored([70], tokens_of(71)[70 * 16 :], parent=69))
    await drain(redis, life)
    assert life.writer.counts["missed"] == 1
    events(life, removed([3]))
    await drain(redis, life)
    assert await redis.match(packed_of(71)) == {HOLDER: 3}


async def test_sweeping_spares_what_the_living_hold(redis: RedisIndex) -> None:
    gone, stays = Life("r1", 16), Life("r0", 16)
    for life in (gone, stays):
        await lead(redis, life)
    events(gone, stored(range(200), tokens_of(200)))
    events(stays, stored(range(100), tokens_of(100)))
    for life in (gone, stays):
        await drain(redis, life)
    events(gone, CLEARED)
    await drain(redis, gone)
    for _ in range(100):
        if (await redis.sweep(10))[2]:
            break
    assert await redis.totals() == (128, 2)
    assert await redis.match(packed_of(200)) == {HOLDER: 100}


async def test_a_mirror_that_fell_behind_a_trimmed_stream_starts_over(
    redis: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_index.redis_index._STREAM_LENGTH", 1)
    life = Life("r0", 16)
    await lead(redis, life)
    events(life, stored(range(10), tokens_of(10)))
    await drain(redis, life)
    mirror = Mirror(redis, max_units=1000)
    task = asyncio.create_task(mirror.run())
    try:
        await eventually(lambda: mirror.match(packed_of(10)) == {HOLDER: 10})
        task.cancel()
        # `MAXLEN ~` trims whole macro nodes of the stream only.
        for number in range(300):
            events(life, removed([9]), stored([9], tokens_of(10)[144:], parent=8))
            if number == 299:
                events(life, removed([5]))
            await drain(redis, life)
        page = await redis.read_changes(1, 1)
        assert page.entries[0][0] > 2
        restarted = Mirror(redis, max_units=1000)
        restarted._radix = mirror.radix
        task = asyncio.create_task(restarted.run())
        await eventually(lambda: restarted.match(packed_of(10)) == {HOLDER: 5})
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_mirror_is_silent_when_it_lags(redis: RedisIndex) -> None:
    life = Life("r0", 16)
    await lead(redis, life)
    events(life, stored([1], tokens_of(1)))
    await drain(redis, life)
    mirror = Mirror(redis, max_units=1000, max_lag_s=0.1)
    assert mirror.match(packed_of(1)) == {}
    task = asyncio.create_task(mirror.run())
    await eventually(lambda: mirror.match(packed_of(1)) == {HOLDER: 1})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not mirror.current
    assert mirror.match(packed_of(1)) == {}


async def test_a_bounded_mirror_under_reports(redis: RedisIndex) -> None:
    life = Life("r0", 16)
    await lead(redis, life)
    events(life, stored(range(70), tokens_of(70)))
    await drain(redis, life)
    mirror = Mirror(redis, max_units=64)
    task = asyncio.create_task(mirror.run())
    try:
        await eventually(lambda: mirror.current)
        # Which of the two runs comes first in a snapshot is up to Redis.
        assert mirror.radix.units + mirror.radix.refused_units == 70
        matched = {64: {HOLDER: 64}, 6: {}}[mirror.radix.units]
        await eventually(lambda: mirror.match(packed_of(70)) == matched)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_functions_that_were_flushed_are_loaded_again(
    server: Server, redis: RedisIndex
) -> None:
    life = Life("r0", 16)
    await lead(redis, life)
    client = Redis.from_url(server.url)
    await client.execute_command("FUNCTION", "FLUSH")
    assert await redis.match(packed_of(1)) == {}
    await client.execute_command("FUNCTION", "FLUSH")
    await client.aclose()
    events(life, stored([1], tokens_of(1)))
    call = life.writer.next_call()
    assert call is not None
    (refused,) = await redis.apply([call])
    assert isinstance(refused, IndexUnavailable)
    life.writer.fail()
    await drain(redis, life)
    assert await redis.match(packed_of(1)) == {HOLDER: 1}


async def test_no_server_is_unavailable(tmp_path: Path) -> None:
    redis = index_on(f"unix://{tmp_path}/none.sock")
    writer = SourceWriter(KEY, Life("r0", 16).state.ledger)
    writer.lead(1)
    call = writer.next_call()
    assert call is not None
    for attempt in (
        redis.match(packed_of(1)),
        redis.apply([call]),
        redis.acquire(KEY, "a", 100, "g"),
        redis.snapshot(),
        redis.read_changes(0, 1),
        redis.sweep(1),
        redis.load_functions(),
    ):
        with pytest.raises(IndexUnavailable):
            await attempt
    assert writer.next_call() == call
    await redis.close()


async def test_a_full_queue_ends_in_a_rewrite(
    redis: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_index.writer._MAX_PENDING", 10)
    life = Life("r0", 16)
    await lead(redis, life)
    for i in range(30):
        events(life, stored([i], tokens_of(1, i * 16), parent=i - 1 if i else None))
    events(life, removed([20]))
    assert life.writer.counts["overflow"] == 1
    await drain(redis, life)
    assert await redis.match(packed_of(30)) == {HOLDER: 20}
