"""The openai Python SDK, unchanged: synchronous, asynchronous, raw, failing, cut."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.contract.conftest import Served
from tests.router.support import closed_port

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "sim-model", "messages": MESSAGES, "max_tokens": 8, **fields}
    )


def text_of(chunks: Any) -> str:
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)


async def test_both_clients_streaming_and_not_say_the_same(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    whole = ask(client).choices[0].message.content
    assert whole
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole
    assert chunks[-1].usage.completion_tokens == 8
    fields: Any = {"model": "sim-model", "messages": MESSAGES, "max_tokens": 8}
    answer = await async_client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == whole
    stream = await async_client.chat.completions.create(**fields, stream=True)
    assert text_of([each async for each in stream]) == whole


def test_the_stream_helper_builds_the_whole_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="sim-model", messages=MESSAGES, max_tokens=8
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert {"chunk", "content.delta"} <= kinds
    assert final.choices[0].message.content == ask(client).choices[0].message.content


def test_raw_responses_show_the_gateways_headers(served: Served, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="sim-model",
        messages=MESSAGES,
        max_tokens=2,
        extra_headers={"x-request-id": "mine-1"},
    )
    assert raw.headers["x-kvroute-replica"] == served.replica.name
    assert raw.headers["x-kvroute-request-id"] == "mine-1"
    assert int(raw.headers["x-kvroute-matched-tokens"]) >= 0
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        model="sim-model", messages=MESSAGES, max_tokens=2, stream=True
    ) as streaming:
        assert streaming.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_models_and_completions(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["sim-model"]
    assert client.models.retrieve("sim-model").id == "sim-model"
    assert client.completions.create(model="sim-model", prompt="Once", max_tokens=4).choices[0].text
    ids = [300, 301, 302]
    assert client.completions.create(model="sim-model", prompt=ids, max_tokens=4).choices[0].text


def test_errors_are_of_the_right_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="sim-model") as unknown:
        ask(client, model="nope")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError):
        ask(client, max_tokens=10**9)
    with pytest.raises(openai.BadRequestError) as malformed:
        ask(client, messages=5)
    assert malformed.value.code == "invalid_request"
    with pytest.raises(openai.APIStatusError) as large:
        ask(client, messages=[{"role": "user", "content": "x" * (65 << 20)}])
    assert large.value.status_code == 413 and large.value.code == "body_too_large"
    with pytest.raises(openai.InternalServerError) as late:
        ask(client, max_tokens=4000, extra_headers={"x-request-timeout": "0.3"})
    assert late.value.status_code == 504 and late.value.code == "replica_timeout"
    with pytest.raises(openai.APIConnectionError):
        ask(client.with_options(base_url=f"http://127.0.0.1:{closed_port()}/v1"))


def test_without_a_replica_the_error_says_so(served: Served, client: openai.OpenAI) -> None:
    served.kill()
    for _ in range(3):
        with pytest.raises(openai.InternalServerError) as nobody:
            ask(client)
        assert nobody.value.status_code == 503 and nobody.value.code == "no_replica"
    told_s = int(nobody.value.response.headers["retry-after"])
    began_s = time.monotonic()
    with pytest.raises(openai.InternalServerError):
        ask(client.with_options(max_retries=1))
    assert time.monotonic() - began_s >= told_s  # by itself it waits for half a second


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_timeout_ends_its_request(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.APITimeoutError):
        list(ask(client, max_tokens=4000, timeout=0.5, stream=stream, n=1, **slow(stream)))


def slow(stream: bool) -> dict[str, Any]:
    """A prompt whose first token takes longer than the time-out, so that streams time out too."""
    text = "word " * 20_000
    return {"messages": [{"role": "user", "content": text}]} if stream else {}


def test_leaving_a_stream_ends_its_request(client: openai.OpenAI) -> None:
    stream = ask(client, max_tokens=4000, stream=True)
    assert next(iter(stream)).choices
    stream.close()  # the fixture waits until no load is held


def test_a_cut_stream_is_an_exception(served: Served, client: openai.OpenAI) -> None:
    seen = 0
    with pytest.raises(openai.APIError, match="broke off"):
        for _ in ask(client, max_tokens=4000, stream=True):
            seen += 1
            if seen == 3:
                served.kill()
    assert seen >= 3


async def test_a_cut_stream_is_an_exception_for_the_asynchronous_client(
    served: Served, async_client: openai.AsyncOpenAI
) -> None:
    stream = await async_client.chat.completions.create(
        model="sim-model", messages=MESSAGES, max_tokens=4000, stream=True
    )
    seen = 0
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            seen += 1
            if seen == 3:
                served.kill()
