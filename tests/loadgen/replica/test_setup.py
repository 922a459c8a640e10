"""Replicas that are set up badly: each mistake shows where it shows with a real engine."""

from __future__ import annotations

import asyncio
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadgen.replica.events import BlockRemoved, BlocksStored
from loadgen.replica.pool import CPU, PoolAnnouncer
from loadgen.replica.server import Replica
from loadgen.replica.setup import Events, Pool, Setup
from loadgen.replica.wire import EventEncoding

from .conftest import StartFleet

PROMPT = list(range(100, 150))


async def asked(replica: Replica, *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    async with httpx.AsyncClient(base_url=replica.url, timeout=10) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return answer


async def got(replica: Replica, path: str) -> Any:
    async with httpx.AsyncClient(base_url=replica.url, timeout=10) as client:
        return await client.get(path)


def cached(answer: Any) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def replayed(replica: Replica, rank: int = 0) -> list[Any]:
    """Every batch that a rank has published."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(replica.ranks[rank].publisher.address.replay_endpoint)
        await dealer.send_multipart([b"", bytes(8)])
        batches = []
        async with asyncio.timeout(5):
            while (frames := await dealer.recv_multipart())[-1]:
                batches.append(msgspec.msgpack.decode(frames[-1]))
        return batches


async def test_without_prefix_caching_nothing_is_reused_or_told(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(prefix_caching=False)
    replica = fleet.replicas[0]
    assert [cached(await asked(replica)) for _ in range(2)] == [0, 0]
    assert await replayed(replica) == []
    assert 'enable_prefix_caching="False"' in (await got(replica, "/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_without_details(start_fleet: StartFleet, stream: bool) -> None:
    fleet = await start_fleet(setup=Setup(prompt_tokens_details=False))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await asked(fleet.replicas[0], **options)
    # Streams leave out what is null.
    assert ('"prompt_tokens_details":null' in answer.text) is not stream
    assert "cached_tokens" not in answer.text


async def test_ignored_salts_keep_nothing_apart(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ignore_salts=True)
    first, second = [await asked(fleet.replicas[0], cache_salt=salt) for salt in "ab"]
    assert (cached(first), cached(second)) == (0, 48)


async def test_older_engines_lack_what_came_later(start_fleet: StartFleet) -> None:
    old = await start_fleet(ranks=2, setup=Setup(version="0.13.0"), events=EventEncoding.ARRAY)
    replica = old.replicas[0]
    assert (await got(replica, "/version")).json() == {"version": "0.13.0"}
    assert (await got(replica, "/kv_event_sources")).status_code == 404
    for _ in range(2):
        await asked(replica, headers={"x-data-parallel-rank": "1"}, cache_salt="s")
    ((_, ((tag, *fields),), _),) = await replayed(replica)
    assert (tag, len(fields)) == ("BlockStored", 7)
    newer = (await start_fleet(ranks=2, setup=Setup(version="0.30.1"))).replicas[0]
    await asked(newer, headers={"x-data-parallel-rank": "1"})
    assert (await replayed(newer, 0), len(await replayed(newer, 1))) == ([], 1)


async def test_a_skewed_clock_shows_in_dates_and_events(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(setup=Setup(clock_skew_s=3600))
    answer = await asked(fleet.replicas[0])
    date_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    assert 3500 < date_s - time() < 3700
    ((stamped_s, *_),) = await replayed(fleet.replicas[0])
    assert 3500 < stamped_s - time() < 3700


async def test_events_off_and_where_they_are_said_to_be(start_fleet: StartFleet) -> None:
    off = (await start_fleet(setup=Setup(events=Events.OFF))).replicas[0]
    await asked(off)
    assert (await got(off, "/kv_event_sources")).json() == {}
    setup = Setup(listed_host="10.9.8.7", listed_ranks=1)
    moved = (await start_fleet(ranks=2, setup=setup)).replicas[0]
    ((rank, source),) = (await got(moved, "/kv_event_sources")).json().items()
    assert (rank, urlsplit(source["endpoint"]).hostname) == ("0", "10.9.8.7")


async def test_an_endpoint_that_connects_reaches_who_listens_there(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(setup=Setup(events=Events.CONNECT))
    replica = fleet.replicas[0]
    endpoint = (await got(replica, "/kv_event_sources")).json()["0"]["endpoint"]
    assert endpoint.startswith("tcp://127.0.0.1:")
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as listener:
        listener.linger = 0
        listener.subscribe(b"")
        listener.bind(endpoint)
        number = 0
        async with asyncio.timeout(10):
            while not await listener.poll(100):
                number += 1
                await asked(replica, prompt=[number] * 40)


async def test_ranks_on_hosts_of_their_own_follow_vllms_ports(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ranks=2, setup=Setup(rank_per_host=True))
    listed = (await got(fleet.replicas[0], "/kv_event_sources")).json()
    assert listed["1"]["endpoint"] == listed["0"]["replay_endpoint"]
    addresses = [rank.publisher.address for rank in fleet.replicas[0].ranks]
    assert [urlsplit(each.endpoint).hostname for each in addresses] == ["127.0.0.1", "127.0.0.2"]


def stored(hashes: list[int], parent: int | None, salt: str = "") -> BlocksStored:
    return BlocksStored(hashes, parent, list(range(4 * len(hashes))), 4, salt, "")


def test_a_pool_announces_under_unsalted_hashes_one_block_an_event() -> None:
    pool = PoolAnnouncer(Pool.LMCACHE_DRIVEN, blocks=8, seed=0)
    plain = pool.with_pool([stored([1, 2], None)])
    again = pool.with_pool([stored([7, 8], None, salt="a")])
    assert [each.medium for each in plain] == ["GPU", CPU, CPU]
    assert len(again) == 1, "the same blocks, whatever their salt, are stored once"
    assert plain[2].parent == plain[1].hashes[0]


@pytest.mark.parametrize(
    ("mode", "removals"), [(Pool.LMCACHE_DRIVEN, 2), (Pool.STORES, 0), (Pool.SILENT, 0)]
)
def test_only_one_mode_tells_what_a_full_pool_drops(mode: Pool, removals: int) -> None:
    said = PoolAnnouncer(mode, blocks=1, seed=0).with_pool([stored([1, 2, 3], None)])
    gone = [each for each in said if isinstance(each, BlockRemoved)]
    assert (len(gone), {each.medium for each in gone} <= {CPU}) == (removals, True)
