from functools import partial

import httpx
import openai
import pytest

from loadgen.replica.errors import RequestRefused
from loadgen.replica.response_routes import Kept, ResponseMemory
from tests.loadgen.replica.conftest import StartFleet, until

MODEL = "sim-model"
LONG = "The scheduler keeps what it has and asks for the rest. " * 12


async def test_whole_and_streamed_agree(sdk: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL, "input": LONG, "instructions": "Be brief.", "max_output_tokens": 12}
    whole = await sdk.responses.create(**asked)
    stream = await sdk.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    last = events[-1].response
    assert text == whole.output_text == last.output_text == events[-4].text != ""
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == last.usage.output_tokens == 12
    assert whole.usage.input_tokens_details.cached_tokens == 0
    assert last.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens - 16
    assert len({event.response.id for event in (*events[:2], events[-1])}) == 1


async def test_the_sdks_own_stream_accumulator(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(model=MODEL, input="Hello") as stream:
        final = await stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text


async def test_the_same_prompt_as_a_chat(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        max_output_tokens=9,
    )
    chat = await sdk.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        max_tokens=9,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_continuation_hits_what_was_said(sdk: openai.AsyncOpenAI, streamed: bool) -> None:
    asked = {"model": MODEL, "input": LONG, "max_output_tokens": 60}
    if streamed:
        events = [event async for event in await sdk.responses.create(**asked, stream=True)]
        first = events[-1].response
    else:
        first = await sdk.responses.create(**asked)
    second = await sdk.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=4
    )
    said = first.usage.input_tokens + first.usage.output_tokens
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > said
    assert second.usage.input_tokens_details.cached_tokens >= said - 16 - 8
    again = await sdk.responses.retrieve(first.id)
    assert again.output_text == first.output_text


async def test_tools_and_their_results_go_into_the_prompt(sdk: openai.AsyncOpenAI) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a number"}
    user = {"role": "user", "content": "Look."}
    sizes = []
    for items in ([user], [user, call], [user, call, result]):
        answer = await sdk.responses.create(model=MODEL, input=items, tools=[tool])
        sizes.append(answer.usage.input_tokens)
    bare = await sdk.responses.create(model=MODEL, input=[user])
    assert sorted({bare.usage.input_tokens, *sizes}) == [bare.usage.input_tokens, *sizes]


async def test_what_is_not_stored_or_unknown_is_not_found(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 2, "store": False}
    created = (await client.post("/v1/responses", json=body)).json()
    for answer in (
        await client.get(f"/v1/responses/{created['id']}"),
        await client.post("/v1/responses/resp_unknown/cancel"),
        await client.post("/v1/responses", json={**body, "previous_response_id": "resp_unknown"}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "invalid_request_error")
        assert "not found" in error["message"]
    refused = await client.post("/v1/responses", json={**body, "background": True})
    assert refused.status_code == 400


async def test_background_responses_are_polled_and_cancelled(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(decode_step_s=0.005)
    url = f"{fleet.replicas[0].url}/v1"
    rank = fleet.replicas[0].ranks[0]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        asked = {"model": MODEL, "input": "Hello", "background": True}
        short = await sdk.responses.create(**asked, max_output_tokens=2)
        assert short.status == "queued"
        await until(lambda: rank.times.finished["length"] == 1)
        assert (await sdk.responses.retrieve(short.id)).usage.output_tokens == 2
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await sdk.responses.cancel(short.id)
        long = await sdk.responses.create(**asked, max_output_tokens=5000)
        await until(lambda: rank.running == 1)
        assert (await sdk.responses.cancel(long.id)).status == "cancelled"
        assert (rank.running, rank.waiting) == (0, 0)
        assert (await sdk.responses.retrieve(long.id)).status == "cancelled"


def test_the_oldest_responses_are_forgotten_and_stopped() -> None:
    memory = ResponseMemory(limit=2)
    stopped: list[str] = []
    for name in "abc":
        memory.add(Kept({"id": name}, [], stop=partial(stopped.append, name)))
    assert stopped == ["a"]
    assert [memory.find(name).body["id"] for name in "bc"] == ["b", "c"]
    with pytest.raises(RequestRefused):
        memory.find("a")
