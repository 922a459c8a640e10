import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest

from loadgen.replica.api import Flavor
from loadgen.replica.events import BlockRemoved, BlocksCleared, BlocksStored
from loadgen.replica.server import Fleet
from loadgen.replica.sglang_wire import SglangEncoder
from loadgen.replica.wire import EventEncoding
from tests.loadgen.replica.conftest import StartFleet
from tests.loadgen.replica.test_server import history


@pytest.fixture
async def sglang(start_fleet: StartFleet) -> Fleet:
    return await start_fleet(flavor=Flavor.SGLANG, ranks=2, adapters=("tuned",))


@pytest.fixture
async def client(sglang: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=sglang.replicas[0].url, timeout=10) as client:
        yield client


async def generate(client: httpx.AsyncClient, **asked: Any) -> Any:
    asked["sampling_params"] = {"max_new_tokens": 6, **asked.get("sampling_params", {})}
    answer = await client.post("/generate", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_text_and_ids_give_one_answer(client: httpx.AsyncClient) -> None:
    ids = (await client.post("/tokenize", json={"prompt": "Some text"})).json()["tokens"]
    by_text = await generate(client, text="Some text", rid="r1")
    by_ids = await generate(client, input_ids=ids)
    assert by_text["text"] == by_ids["text"] != ""
    assert by_text["output_ids"] == by_ids["output_ids"]
    meta = by_text["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", len(ids), 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    several = await generate(client, text=["Some text", "Other text"])
    assert several[0]["text"] == by_text["text"] != several[1]["text"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "sim-model", "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200


async def test_streams_repeat_the_text_from_its_beginning(client: httpx.AsyncClient) -> None:
    whole = await generate(client, text="Some text", data_parallel_rank=1)
    asked = {
        "text": "Some text",
        "sampling_params": {"max_new_tokens": 6},
        "stream": True,
        "data_parallel_rank": 1,
    }
    async with client.stream("POST", "/generate", json=asked) as stream:
        lines = [line async for line in stream.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    for earlier, later in pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == whole["text"]


async def test_cached_tokens_are_told_of_every_prompt(client: httpx.AsyncClient) -> None:
    asked = {"input_ids": [[7] * 100, [8] * 100], "routed_dp_rank": 1}
    first = await generate(client, **asked)
    second = await generate(client, **asked)
    assert [each["meta_info"]["cached_tokens"] for each in (*first, *second)] == [0, 0, 96, 96]
    ends = await generate(client, text="Some text", sampling_params={"max_new_tokens": None})
    assert ends["meta_info"]["finish_reason"]["type"] == "stop"


async def test_server_info_leads_to_the_events(sglang: Fleet, client: httpx.AsyncClient) -> None:
    await generate(client, input_ids=[7] * 100, data_parallel_rank=1)
    info = (await client.get("/get_server_info")).json()
    assert info == (await client.get("/server_info")).json()
    assert (info["dp_size"], info["page_size"]) == (2, 16)
    config = json.loads(info["kv_events_config"])
    described = sglang.replicas[0].describe()
    for name, key in (("endpoint", "kv_events"), ("replay_endpoint", "replay")):
        first = int(config[name].rpartition(":")[2])
        ports = [int(each.rpartition(":")[2]) for each in described[key]]
        assert ports == [first, first + 1]
    ((_, events),) = await history(sglang.replicas[0], rank=1)
    assert [event["type"] for event in events] == ["BlockStored"] * 6
    parents = [event["parent_block_hash"] for event in events]
    assert parents == [None, *(event["block_hashes"][0] for event in events[:-1])]
    assert all(event["token_ids"] == [7] * 16 for event in events)


async def test_names_of_sglang_and_none_of_vllm(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert card["owned_by"] == "sglang"
    model = (await client.get("/get_model_info")).json()
    assert (model["model_path"], model["is_generation"]) == ("sim-model", True)
    await generate(client, input_ids=[7] * 100, data_parallel_rank=0)
    await generate(client, input_ids=[7] * 100, data_parallel_rank=0)
    text = (await client.get("/metrics")).text
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage"):
        assert f"\nsglang:{name}{{" in text
    hit_rate = 'sglang:cache_hit_rate{dp_rank="0",engine_type="unified",model_name="sim-model"}'
    assert f"{hit_rate} 0.48" in text
    assert "vllm:" not in text
    for path in ("/kv_event_sources", "/is_sleeping", "/version", "/v1/files"):
        assert (await client.get(path)).status_code == 404
    assert (await client.get("/health_generate")).status_code == 200
    assert (await client.post("/flush_cache")).status_code == 200
    again = await generate(client, input_ids=[7] * 100, data_parallel_rank=0)
    assert again["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"text": ""},
        {"input_ids": [1 << 31]},
        {"text": "a", "sampling_params": {"max_new_tokens": 0}},
        {"text": "a", "data_parallel_rank": 2},
    ],
)
async def test_refusals(client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    assert (await client.post("/generate", json=asked)).status_code == 400


async def test_a_restart_keeps_the_ports(sglang: Fleet) -> None:
    before = sglang.describe()
    await sglang.restart(0)
    assert sglang.describe() == before


EVENTS = (
    BlocksStored([1 << 63, 5], 3, [1, 2, 3, 4], 2, "salt", "tuned", "s"),
    BlockRemoved((1 << 64) - 1),
    BlocksCleared(),
)


def test_events_as_maps() -> None:
    payload = SglangEncoder(EventEncoding.MAP, 1).encode(EVENTS, 1.5)
    seconds, events, rank = msgspec.msgpack.decode(payload)
    assert (seconds, rank) == (1.5, 1)
    more = {"block_size": 2, "medium": "GPU", "cache_salt": "salt", "session_id": "s"}
    lora_id = events[0]["lora_id"]
    tuned = {"type": "BlockStored", "lora_name": "tuned", "lora_id": lora_id, **more}
    lowest = -(1 << 63)
    assert events == [
        {**tuned, "block_hashes": [lowest], "parent_block_hash": 3, "token_ids": [1, 2]},
        {**tuned, "block_hashes": [5], "parent_block_hash": lowest, "token_ids": [3, 4]},
        {"type": "BlockRemoved", "block_hashes": [-1], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_events_as_arrays() -> None:
    payload = SglangEncoder(EventEncoding.ARRAY, 0).encode(EVENTS, 1.5)
    stored, _, removed, cleared = msgspec.msgpack.decode(payload)[1]
    assert stored[:5] == ["BlockStored", [-(1 << 63)], 3, [1, 2], 2]
    assert stored[6:] == ["GPU"]
    assert removed == ["BlockRemoved", [-1], "GPU"]
    assert cleared == ["AllBlocksCleared"]
