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
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:-3] == ["content_block_delta"] * len(deltas)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    used = whole["usage"]
    prompt = seen[0]["message"]["usage"]["input_tokens"]
    assert input_tokens(used) == prompt
    assert (used["output_tokens"], used["cache_read_input_tokens"]) == (8, 0)
    last = seen[-2]
    assert last["delta"]["stop_reason"] == "max_tokens"
    assert input_tokens(last["usage"]) == prompt
    assert last["usage"]["cache_read_input_tokens"] >= prompt - 16


def input_tokens(usage: dict[str, int]) -> int:
    """What was read from the cache or written to it is not part of `input_tokens`."""
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[kind] for kind in kinds)


async def test_a_tool_that_must_be_called_is_used(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    forced = {"tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 50}
    asked = body(tools=[{"name": "weather", "input_schema": schema}], **forced)
    whole = (await client.post(MESSAGES, json=asked)).json()
    assert whole["stop_reason"] == "tool_use"
    assert whole["content"][0]["input"] == {"town": "cache"}
    seen = await events(client, asked)
    assert seen[1]["content_block"]["name"] == "weather"
    parts = [each["delta"] for each in seen if each["type"] == "content_block_delta"]
    assert json.loads("".join(part["partial_json"] for part in parts)) == {"town": "cache"}


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
    assert input_tokens(message["usage"]) == same["usage"]["prompt_tokens"]
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
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
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


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"max_tokens": None}, "body.max_tokens"),
        ({"messages": [{"role": "clown", "content": "Hi"}]}, "body.messages.0.role"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "body.messages.0.content.0"),
    ],
)
async def test_a_body_that_does_not_fit_is_told_in_openais_shape(
    client: httpx.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    answer = await client.post(MESSAGES, json=body(**changes))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
