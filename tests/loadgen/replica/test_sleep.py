import asyncio
import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadgen.replica.server import Fleet
from tests.loadgen.replica.conftest import StartFleet, until
from tests.loadgen.replica.test_server import history

COMPLETIONS = "/v1/completions"


def prompt(**fields: Any) -> dict[str, Any]:
    return {"prompt": [7] * 100, "max_tokens": 1, **fields}


async def sleep_states(client: httpx.AsyncClient) -> set[str]:
    """The states that every rank is in."""
    text = (await client.get("/metrics")).text
    return {
        sample.labels["sleep_state"]
        for family in text_string_to_metric_families(text)
        if family.name == "vllm:engine_sleep_state"
        for sample in family.samples
        if sample.value
    }


async def test_states_follow_sleep_and_wake_up(client: httpx.AsyncClient) -> None:
    async def seen() -> tuple[bool, set[str]]:
        sleeping = (await client.get("/is_sleeping")).json()["is_sleeping"]
        return sleeping, await sleep_states(client)

    assert await seen() == (False, {"awake"})
    for query, states in (("?level=1", "weights_offloaded"), ("?level=2", "discard_all")):
        assert (await client.post(f"/sleep{query}")).status_code == 200
        assert await seen() == (True, {states})
        assert (await client.get("/health")).status_code == 200
    await client.post("/sleep?level=0")
    assert await seen() == (True, set())
    await client.post("/wake_up")
    assert await seen() == (False, {"awake"})
    assert (await client.post("/sleep?level=3")).status_code == 400
    assert (await client.post("/sleep?mode=keep")).status_code == 400


async def test_requests_wait_for_the_end_of_the_sleep(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    rank = fleet.replicas[0].ranks[0]
    await client.post(COMPLETIONS, json=prompt())
    await client.post("/sleep?level=1")
    waiting = asyncio.create_task(client.post(COMPLETIONS, json=prompt()))
    await until(lambda: rank.waiting == 1)
    # The cache went with the sleep, but nobody was told yet: that takes a step.
    kinds = [event["type"] for _, batch in await history(fleet.replicas[0]) for event in batch]
    assert kinds == ["BlockStored"]
    assert not waiting.done()
    await client.post("/wake_up")
    answer = (await waiting).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    kinds = [event["type"] for _, batch in await history(fleet.replicas[0]) for event in batch]
    assert kinds == ["BlockStored", "AllBlocksCleared", "BlockStored"]


async def test_level_0_keeps_the_cache(client: httpx.AsyncClient) -> None:
    await client.post(COMPLETIONS, json=prompt())
    await client.post("/sleep?level=0")
    await client.post("/wake_up")
    answer = (await client.post(COMPLETIONS, json=prompt())).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_what_is_in_flight_ends_with_abort(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(decode_step_s=0.01, max_num_seqs=2)
    rank = fleet.replicas[0].ranks[0]
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url, timeout=10) as client:
        asked = prompt(max_tokens=5000)
        whole = [asyncio.create_task(client.post(COMPLETIONS, json=asked)) for _ in range(3)]
        await until(lambda: (rank.running, rank.waiting) == (2, 1))
        body = {**asked, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as stream:
            await client.post("/sleep")
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"
        for task in whole:
            answer = (await task).json()
            assert answer["choices"][0]["finish_reason"] == "abort"
            assert answer["usage"]["completion_tokens"] < 5000
        assert (rank.running, rank.waiting, rank.kv_usage) == (0, 0, 0.0)
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_without_developer_mode_only_metrics_tell(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(dev_mode=False)
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        for method, path in (("GET", "/is_sleeping"), ("POST", "/sleep"), ("GET", "/server_info")):
            assert (await client.request(method, path)).status_code == 404
        await client.post("/sim/sleep?level=1")
        assert await sleep_states(client) == {"weights_offloaded"}
        await client.post("/sim/wake_up")
        assert await sleep_states(client) == {"awake"}


async def test_server_info(client: httpx.AsyncClient) -> None:
    text = (await client.get("/server_info")).json()
    assert isinstance(text["vllm_config"], str)
    config = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert config["cache_config"]["num_gpu_blocks"] == 512
    assert config["scheduler_config"]["policy"] == "fcfs"
