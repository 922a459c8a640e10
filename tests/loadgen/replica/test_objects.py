import json
from typing import Any

import httpx
import openai
import pytest

from loadgen.replica.errors import RequestRefused
from loadgen.replica.objects import FileStore, StoredFile
from loadgen.replica.server import Fleet
from tests.loadgen.replica.conftest import StartFleet, until

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Question {number}"}
    body = {"model": "sim-model", "messages": [message], "max_tokens": 4, **fields}
    return {"custom_id": f"q{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def test_files_come_and_go(sdk: openai.AsyncOpenAI) -> None:
    data = b"\x00\xff\r\n" * 100
    file = await sdk.files.create(file=("name.bin", data), purpose="user_data")
    other = await sdk.files.create(file=("other.bin", b"x"), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("name.bin", len(data), "user_data")
    assert (await sdk.files.content(file.id)).content == data
    assert [each.id async for each in sdk.files.list()] == [other.id, file.id]
    assert [each.id async for each in sdk.files.list(purpose="batch")] == [other.id]
    assert (await sdk.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.files.retrieve(file.id)


async def test_a_batch_runs_through_the_engine(sdk: openai.AsyncOpenAI, fleet: Fleet) -> None:
    lines = [line(number) for number in range(40)] + [line(40, model="other")]
    lines[0]["body"]["stream"] = True
    file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = await sdk.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata) == ("in_progress", {"a": "b"})
    rank = fleet.replicas[0].ranks[0]
    await until(lambda: rank.times.finished["length"] == 40)
    done = await sdk.batches.retrieve(batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    output = (await sdk.files.content(done.output_file_id)).text.splitlines()
    answers = {entry["custom_id"]: entry["response"] for entry in map(json.loads, output)}
    assert set(answers) == {f"q{number}" for number in range(40)}
    alone = await sdk.chat.completions.create(**lines[7]["body"])
    body = answers["q7"]["body"]
    assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    failed = json.loads((await sdk.files.content(done.error_file_id)).text)
    assert failed["response"]["status_code"] == 404
    assert [each.id async for each in sdk.batches.list()] == [batch.id]


async def test_a_batch_of_refused_lines_ends(sdk: openai.AsyncOpenAI) -> None:
    lines = [line(number, model="other") for number in range(3000)]
    file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert (batch.status, batch.request_counts.failed) == ("completed", 3000)
    assert batch.output_file_id is None


async def test_a_cancelled_batch_leaves_the_engine(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(decode_step_s=0.005)
    rank = fleet.replicas[0].ranks[0]
    url = f"{fleet.replicas[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        lines = [line(number, max_tokens=4000) for number in range(40)]
        file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = await sdk.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        await until(lambda: rank.running > 0)
        assert rank.running + rank.waiting == 16
        assert (await sdk.batches.cancel(batch.id)).status == "cancelled"
        assert (rank.running, rank.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("data", "endpoint"),
    [
        (b"", CHAT),
        (b"no json\n", CHAT),
        (b"{}\n", CHAT),
        (jsonl([line(1, "/v1/completions")]), CHAT),
        (jsonl([line(1)]), "/v1/other"),
    ],
)
async def test_refused_batches(client: httpx.AsyncClient, data: bytes, endpoint: str) -> None:
    files = {"file": ("in.jsonl", data)}
    file = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    assert (await client.post("/v1/batches", json=asked)).status_code == 400
    unknown = {**asked, "endpoint": CHAT, "input_file_id": "file-unknown"}
    assert (await client.post("/v1/batches", json=unknown)).status_code == 404


def test_the_store_is_bounded() -> None:
    store = FileStore(max_files=2, max_bytes=10)
    files = [StoredFile(str(number), "batch", bytes(4)) for number in range(3)]
    for file in files:
        store.add(file)
    assert store.all() == [files[2], files[1]]
    big = StoredFile("big", "batch", bytes(7))
    store.add(big)
    assert store.all() == [big]
    with pytest.raises(RequestRefused):
        store.add(StoredFile("too big", "batch", bytes(11)))
    store.remove(big.id)
    store.add(StoredFile("fits again", "batch", bytes(10)))
    assert len(store.all()) == 1
