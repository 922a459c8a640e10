import json
from typing import Any

import httpx
import pytest

LONG = "The scheduler keeps what it has and asks for the rest. " * 12
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "sim-model",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": LONG}],
        **fields,
    }


async def events(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[dict[str, Any]]:
    seen = []
    async with client.stream("POST", MESSAGES, json={**asked, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        kind = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                seen.append(json.loads(value))
                assert seen[-1]["type"] == kind
    return seen


async def test_whole_and_streamed_agree(client: httpx.AsyncClient) -> None:
    whole = (await client.post(MESSAGES, json=body())).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    seen = await events(client, body())
    kinds = [event["type"] for event in seen]
    deltas = [event for event in seen if event["type"] == "content_block_delta"]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[3:-3] == ["content_block_delta"] * len(deltas)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    used = whole["usage"]
    assert seen[0]["message"]["usage"]["input_tokens"] == used["input_tokens"]
    assert (used["output_tokens"], used["cache_read_input_tokens"]) == (8, 0)
    last = seen[-2]
    assert last["delta"]["stop_reason"] == "max_tokens"
    assert last["usage"]["cache_read_input_tokens"] >= used["input_tokens"] - 16


async def test_the_same_prompt_as_a_chat(client: httpx.AsyncClient) -> None:
    asked = body(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: abc"},
            {"type": "text", "text": "One. "},
            {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "A"}]},
            {"role": "assistant", "content": "B"},
            {"role": "user", "content": "C"},
        ],
    )
    chat = {
        "model": "sim-model",
        "max_tokens": 8,
        "messages": [
            {"role": "system", "content": "One. Two."},
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "B"},
            {"role": "user", "content": "C"},
        ],
    }
    message = (await client.post(MESSAGES, json=asked)).json()
    same = (await client.post(CHAT, json=chat)).json()
    assert message["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert message["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    del asked["max_tokens"]
    counted = (await client.post(f"{MESSAGES}/count_tokens", json=asked)).json()
    assert counted["input_tokens"] == same["usage"]["prompt_tokens"]


async def test_tool_use_becomes_calls_and_tool_messages(client: httpx.AsyncClient) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    asked = {
        "model": "sim-model",
        "tools": [{"name": "look", "input_schema": {"properties": {}}}],
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "ok"}]}]},
        ],
    }
    function = {"name": "look", "description": None}
    parameters = {"type": "object", "properties": {}}
    chat = {
        "tools": [{"type": "function", "function": {**function, "parameters": parameters}}],
        "messages": [
            {"role": "user", "content": "Look"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "look", "arguments": '{"at":"it"}'}}],
            },
            {"role": "tool", "content": "ok"},
        ],
    }
    counted = (await client.post(f"{MESSAGES}/count_tokens", json=asked)).json()
    assert counted["input_tokens"] == (await client.post("/tokenize", json=chat)).json()["count"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "other"}, 404),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": None}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
        ({"messages": [{"role": "user", "content": ["text"]}]}, 400),
    ],
)
async def test_errors_have_anthropics_shape(
    client: httpx.AsyncClient, changes: dict[str, Any], status: int
) -> None:
    answer = await client.post(MESSAGES, json=body(**changes))
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error"
    assert set(error["error"]) == {"type", "message"}
