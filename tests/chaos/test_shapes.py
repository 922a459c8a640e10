"""A stream that is cut ends in an error event of the kind that its route's clients read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.chaos.client import Answer, ask, chat_body
from tests.chaos.fleet import chaos_fleet

pytestmark = pytest.mark.slow

FAULTS = '{"cut_after_chunks": 6}'
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
BODIES = {
    "/v1/chat/completions": chat_body(stream=True, max_tokens=40),
    MESSAGES: chat_body(stream=True, max_tokens=40),
    RESPONSES: json.dumps({"model": "sim-model", "input": "hi", "stream": True}).encode(),
}


def last_event(answer: Answer) -> tuple[str, dict[str, Any]]:
    name, _, data = answer.events[-1].decode().partition("\n")
    content: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return name.removeprefix("event: "), content


def numbers(answer: Answer) -> list[int]:
    data = [each.partition(b"data: ")[2] for each in answer.events]
    return [json.loads(each)["sequence_number"] for each in data]


async def test_each_route_has_its_own_error_event(tmp_path: Path) -> None:
    async with chaos_fleet(1, tmp_path, replica=("--faults", FAULTS)) as fleet:
        said = {}
        for path, body in BODIES.items():
            answer = await ask(fleet.url, body, path=path)
            assert answer.status == 200 and len(answer.events) > 3, f"{answer}"
            assert not answer.whole, "the transfer is aborted"
            name, content = last_event(answer)
            assert name == "error"
            said[path] = content
            if path == MESSAGES:
                assert b"message_start" in answer.body and b"message_stop" not in answer.body
            if path == RESPONSES:
                assert b"response.completed" not in answer.body
                assert numbers(answer) == list(range(len(answer.events)))
            request_id = answer.headers["x-kvroute-request-id"]
            assert request_id in answer.events[-1].decode()
        for content in said.values():
            assert "broke off" in json.dumps(content)
        chat, messages, responses = said.values()
        assert chat["error"]["code"] == "answer_cut" and "type" not in chat
        assert messages["type"] == "error"
        assert messages["error"]["type"] == "overloaded_error"
        assert set(responses) >= {"type", "code", "message", "param", "sequence_number"}
        assert (responses["type"], responses["code"]) == ("error", "answer_cut")
        await fleet.becomes_idle()


async def test_the_openai_client_sees_the_error_event_of_a_response(tmp_path: Path) -> None:
    async with chaos_fleet(1, tmp_path, replica=("--faults", FAULTS)) as fleet:
        url = f"{fleet.url}/v1"
        seen = []
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.responses.create(model="sim-model", input="hi", stream=True)
            with pytest.raises(openai.APIError, match="broke off") as cut:
                async for event in stream:
                    seen.append(event)
        assert [each.type for each in seen][:2] == ["response.created", "response.in_progress"]
        assert cut.value.code == "answer_cut"
        assert [each.sequence_number for each in seen] == list(range(len(seen)))
