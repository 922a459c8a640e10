"""The SDK's other routes before two replicas: what one of them keeps is found again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.contract.conftest import Served
from tests.whole import Whole, whole_way

pytestmark = pytest.mark.slow

MODEL = "sim-model"
SOUND = bytes(range(256)) * 100


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    """Requests alternate between the replicas: coming back to the right one is no luck."""
    with whole_way(2, gateway=("--policy", "round_robin")) as running:
        yield running


@pytest.fixture(scope="module")
def client(whole: Whole) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{whole.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two", "one"])
    first, second, third = (each.embedding for each in answer.data)
    assert len(first) > 8 and first == third != second


def test_a_response_streams_and_continues_where_it_was_made(client: openai.OpenAI) -> None:
    for _ in range(4):
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
        assert first.output_text
        assert client.responses.retrieve(first.id).output_text == first.output_text
        events = list(
            client.responses.create(
                model=MODEL,
                input="And then?",
                previous_response_id=first.id,
                max_output_tokens=8,
                stream=True,
            )
        )
        last = events[-1].response
        assert last.previous_response_id == first.id
        assert client.responses.retrieve(last.id).output_text == last.output_text


def test_a_response_in_the_background_is_cancelled_where_it_runs(client: openai.OpenAI) -> None:
    for _ in range(2):
        running = client.responses.create(
            model=MODEL, input="Hello", background=True, max_output_tokens=4000
        )
        assert client.responses.cancel(running.id).status == "cancelled"


def test_unknown_objects_are_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.retrieve("resp_ffffffffffffffffffffffffffffffff")
    assert unknown.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_" + "f" * 32)


def test_a_batch_runs_where_its_file_is(whole: Whole, client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    content = json.dumps(line).encode()
    for _ in range(2):
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert client.files.content(file.id).read() == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        whole.wait(lambda made=batch: client.batches.retrieve(made.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id
        out = json.loads(client.files.content(done.output_file_id).read())
        assert out["custom_id"] == "a" and out["response"]["status_code"] == 200


def test_a_transcription_is_uploaded_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "file": ("a.wav", SOUND)}
    text = client.audio.transcriptions.create(**asked).text  # type: ignore[call-overload]
    assert text
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nope", file=("a.wav", SOUND))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_scores(whole: Whole, path: str) -> None:
    fields = {"query": "a", "documents": ["a", "b"], "text_1": "a", "text_2": ["a", "b"]}
    answer = whole.client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text


def test_anthropic_messages_and_their_errors(whole: Whole) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hi"}],
    }
    answer = whole.client.post("/v1/messages", json=body).json()
    assert answer["type"] == "message" and answer["content"][0]["text"]
    counted = whole.client.post("/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    wrong = whole.client.post("/v1/messages", json={**body, "model": "nope"})
    assert wrong.status_code == 404 and wrong.json()["type"] == "error"
    with whole.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as stream:
        names = [line for line in stream.iter_lines() if line.startswith("event: ")]
    assert (names[0], names[-1]) == ("event: message_start", "event: message_stop")


def test_a_cut_response_stream_is_an_exception(served: Served) -> None:
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        seen = 0
        with pytest.raises(openai.APIError, match="broke off"):
            for event in client.responses.create(
                model=MODEL, input="Hello", max_output_tokens=4000, stream=True
            ):
                seen += event.type == "response.output_text.delta"
                if seen == 3:
                    served.kill()
    assert seen >= 3


def test_a_cut_stream_of_messages_ends_in_anthropics_error_event(served: Served) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 4000,
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
    }
    lines: list[str] = []
    with pytest.raises(httpx.RemoteProtocolError):
        with served.client.stream("POST", "/v1/messages", json=body) as stream:
            for line in stream.iter_lines():
                lines.append(line)
                if len(lines) == 20:
                    served.kill()
    said = [line for line in lines if line]
    assert said[-2] == "event: error"
    error = json.loads(said[-1].removeprefix("data: "))
    assert error["type"] == "error" and "broke off" in error["error"]["message"]
