import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from loadgen.replica.errors import ReplicaError
from loadgen.replica.faults import FaultPlan, parse_plan
from loadgen.replica.server import Fleet
from tests.loadgen.replica.conftest import StartFleet, until
from tests.loadgen.replica.test_http import Wire, connect

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [7] * 20, "max_tokens": 10}


async def set_faults(client: httpx.AsyncClient, **plan: Any) -> None:
    assert (await client.post("/sim/faults", json=plan)).status_code == 200


def request(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


Ask = Callable[..., Awaitable[Wire]]


@pytest.fixture
async def ask(fleet: Fleet) -> AsyncIterator[Ask]:
    """Sends a completion request over a connection of its own."""
    wires = []

    async def send(**fields: Any) -> Wire:
        wires.append(wire := await connect(fleet.replicas[0].url))
        wire.writer.write(request(json.dumps({**BODY, **fields}).encode()))
        return wire

    yield send
    for wire in wires:
        wire.writer.close()
        with suppress(ConnectionError):
            await wire.writer.wait_closed()


async def everything(wire: Wire) -> bytes:
    async with asyncio.timeout(5):
        return await wire.reader.read()


async def test_the_next_requests_are_refused(client: httpx.AsyncClient) -> None:
    await set_faults(client, refuse_status=503, retry_after_s=2, times=2)
    answers = [await client.post(COMPLETIONS, json=BODY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert answers[0].headers["retry-after"] == "2"
    assert answers[0].json()["error"]["code"] == 503
    assert (await client.get("/sim/faults")).json()["times"] == 0
    assert (await client.get("/v1/models")).status_code == 200


async def test_a_late_head(client: httpx.AsyncClient, fleet: Fleet) -> None:
    await set_faults(client, head_delay_s=0.05)
    answer = await client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 200
    assert answer.elapsed.total_seconds() >= 0.05
    await set_faults(client, head_delay_s=60)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(COMPLETIONS, json=BODY, timeout=0.05)
    assert fleet.replicas[0].ranks[0].times.finished["length"] == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_streams_are_cut(
    client: httpx.AsyncClient, fleet: Fleet, ask: Ask, reset: bool
) -> None:
    rank = fleet.replicas[0].ranks[0]
    await set_faults(client, cut_after_chunks=3, reset=reset)
    wire = await ask(stream=True, max_tokens=4000)
    seen = b""
    try:
        async with asyncio.timeout(5):
            while piece := await wire.reader.read(65536):
                seen += piece
        ended = "FIN"
    except ConnectionResetError:
        ended = "RST"
    assert ended == ("RST" if reset else "FIN")
    assert seen.count(b"data: ") == 3
    assert b"[DONE]" not in seen
    assert not seen.endswith(b"0\r\n\r\n")
    await until(lambda: (rank.running, rank.waiting) == (0, 0))
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_whole_answers_are_cut_in_the_middle(client: httpx.AsyncClient, ask: Ask) -> None:
    await set_faults(client, cut_after_chunks=1)
    wire = await ask()
    status, fields = await wire.head()
    body = await everything(wire)
    assert status == 200
    assert 0 < len(body) < int(fields["content-length"])


@pytest.mark.parametrize("stream", [False, True])
async def test_heads_are_cut(client: httpx.AsyncClient, ask: Ask, stream: bool) -> None:
    await set_faults(client, cut_in_head=True)
    seen = await everything(await ask(stream=stream))
    assert seen.startswith(b"HTTP/1.1 200")
    assert b"\r\n\r\n" not in seen


@pytest.mark.parametrize(("stream", "after", "data"), [(True, 2, 2), (False, 0, 0), (True, 0, 0)])
async def test_answers_stall(
    client: httpx.AsyncClient, fleet: Fleet, ask: Ask, stream: bool, after: int, data: int
) -> None:
    rank = fleet.replicas[0].ranks[0]
    await set_faults(client, stall_after_chunks=after)
    wire = await ask(stream=stream)
    await until(lambda: rank.times.finished["length"] == 1)
    seen = b""
    while seen.count(b"data: ") < data:
        seen += await wire.reader.read(65536)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            seen += await wire.reader.readexactly(1)
    assert seen.count(b"data: ") == data
    assert bool(seen) == bool(after)
    wire.writer.close()
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_health_hangs_or_fails_while_requests_work(client: httpx.AsyncClient) -> None:
    await set_faults(client, hang_health=True, times=0)
    with pytest.raises(httpx.ReadTimeout):
        await client.get("/health", timeout=0.05)
    assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
    await set_faults(client, health_status=503)
    assert (await client.get("/health")).status_code == 503
    assert (await client.delete("/sim/faults")).json() == {
        **(await client.get("/sim/faults")).json(),
        "health_status": 200,
    }
    assert (await client.get("/health")).status_code == 200


async def test_a_spoilt_answer_that_is_not_reached_is_whole(client: httpx.AsyncClient) -> None:
    clean = (await client.post(COMPLETIONS, json=BODY)).json()
    await set_faults(client, cut_after_chunks=1000)
    answers = [(await client.post(COMPLETIONS, json=BODY)).json() for _ in range(2)]
    assert [answer["choices"] for answer in answers] == [clean["choices"]] * 2


async def test_faults_from_the_start(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(faults=FaultPlan(refuse_status=429, times=1))
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        answers = [await client.post(COMPLETIONS, json=BODY) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [429, 200]
        assert (await client.post("/sim/faults", json={"unknown": 1})).status_code == 400


def test_plans_of_the_command_line() -> None:
    assert parse_plan('{"cut_after_chunks": 3}') == FaultPlan(cut_after_chunks=3)
    for text in ("", "[]", '{"cut_after_chunks": -1}', '{"unknown": 1}'):
        with pytest.raises(ReplicaError):
            parse_plan(text)
