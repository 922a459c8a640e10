import asyncio
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio

from loadgen.replica.errors import TokenizerError
from loadgen.replica.server import Fleet, FleetConfig, Replica
from tests.loadgen.replica.conftest import StartFleet

PROMPT = {"prompt": [7] * 100, "max_tokens": 1}


async def cached(replica: Replica) -> int:
    async with httpx.AsyncClient(base_url=replica.url) as client:
        answer = (await client.post("/v1/completions", json=PROMPT)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def history(replica: Replica, rank: int = 0) -> list[tuple[int, Any]]:
    """(sequence, events) of every batch of one of the replica's ranks."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(replica.describe()["replay"][rank])
    await socket.send_multipart([b"", bytes(8)])
    batches = []
    async with asyncio.timeout(5):
        while (frames := await socket.recv_multipart())[-1]:
            number = int.from_bytes(frames[-2], "big")
            batches.append((number, msgspec.msgpack.decode(frames[-1])[1]))
    context.destroy(linger=0)
    return batches


async def test_replicas_have_caches_of_their_own(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(replicas=2)
    first, second = fleet.replicas
    assert [await cached(first), await cached(first), await cached(second)] == [0, 96, 0]
    # A hit stores nothing, and what stores nothing is not told.
    assert len(await history(first)) == 1
    assert len(await history(second)) == 1


async def test_a_restart_is_a_new_life_at_the_same_addresses(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ranks=2)
    before = fleet.describe()
    assert [await cached(fleet.replicas[0]) for _ in range(3)].count(0) >= 1
    await fleet.restart(0)
    assert fleet.describe() == before
    assert await cached(fleet.replicas[0]) == 0
    assert [number for number, _ in await history(fleet.replicas[0])] == [0]


async def test_equal_seeds_give_equal_hashes(start_fleet: StartFleet) -> None:
    hashes = []
    for seed in (0, 0, 1):
        replica = (await start_fleet(seed=seed)).replicas[0]
        await cached(replica)
        hashes.append((await history(replica))[0][1][0]["block_hashes"])
    assert hashes[0] == hashes[1] != hashes[2]


async def test_a_fleet_that_cannot_start_leaves_nothing(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    port = int(fleet.replicas[0].url.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        await start_fleet(replicas=2, port=port)
    with pytest.raises(TokenizerError):
        Fleet(FleetConfig(tokenizer=fleet._config.tokenizer / "missing"))
    assert await cached(fleet.replicas[0]) == 0
