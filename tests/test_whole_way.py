"""A client's request reaches the replica that holds its prefix, because its events said so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.whole import (
    Whole,
    start_gateway,
    start_replicas,
    tokenizer_options,
    valkey_children,
    whole_way,
)

pytestmark = pytest.mark.slow

WIRE = {
    "maps": ("--events", "map", "--hash", "int", "--replay-framing", "new"),
    "arrays": ("--events", "array", "--hash", "bytes", "--replay-framing", "old"),
}


@pytest.fixture(scope="module", params=WIRE)
def whole(request: pytest.FixtureRequest) -> Iterator[Whole]:
    with whole_way(2, replica=WIRE[request.param]) as running:
        yield running


def prompt(name: str, words: int = 150) -> str:
    return " ".join(f"{name} {number} stays;" for number in range(words))


def test_a_repeated_prompt_goes_to_its_holder_and_is_the_hit_that_was_predicted(
    whole: Whole,
) -> None:
    text = prompt("first")
    cold = whole.chat(text)
    assert cold.headers["x-kvroute-matched-tokens"] == "0"
    assert cold.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    whole.holds(text, 256)
    for _ in range(4):
        warm = whole.chat(text)
        cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(warm.headers["x-kvroute-matched-tokens"]) == cached
        tokens = warm.json()["usage"]["prompt_tokens"]
        assert cached == (tokens - 1) // 16 * 16


def test_a_salt_shares_nothing(whole: Whole) -> None:
    text = prompt("salted")
    whole.holds(text, 256)
    other = whole.chat(text, cache_salt="tenant-a")
    assert other.headers["x-kvroute-matched-tokens"] == "0"
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    whole.wait(
        lambda: (
            int(whole.chat(text, cache_salt="tenant-a").headers["x-kvroute-matched-tokens"]) >= 256
        )
    )


def test_completions_by_text_and_by_token_ids_share_one_chain(whole: Whole) -> None:
    ids = list(range(300, 500))

    def ask(content: object) -> httpx.Response:
        body = {"model": "sim-model", "prompt": content, "max_tokens": 2}
        return whole.client.post("/v1/completions", json=body)

    assert ask(ids).headers["x-kvroute-matched-tokens"] == "0"
    whole.wait(lambda: ask(ids).headers["x-kvroute-matched-tokens"] == "192")
    text = whole.client.post(
        f"{whole.replicas[0]}/detokenize", json={"model": "sim-model", "tokens": ids}
    ).json()["prompt"]
    answer = ask(text)
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-kvroute-matched-tokens"]) == cached


def test_the_openai_sdk_works_unchanged(whole: Whole) -> None:
    with openai.OpenAI(base_url=f"{whole.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["sim-model"]
        messages = [{"role": "user", "content": "Say something."}]
        answer = client.chat.completions.create(
            model="sim-model",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
        )
        text = answer.choices[0].message.content
        assert text and answer.usage and answer.usage.completion_tokens == 8
        stream = client.chat.completions.create(
            model="sim-model",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        deltas = [each.choices[0].delta.content or "" for each in chunks if each.choices]
        assert "".join(deltas) == text
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 8
        completion = client.completions.create(model="sim-model", prompt="Once", max_tokens=4)
        assert completion.choices[0].text
        with pytest.raises(openai.NotFoundError, match="sim-model"):
            client.chat.completions.create(model="nope", messages=messages)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model="sim-model",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=10**9,
            )


def test_langchain_works_unchanged(whole: Whole) -> None:
    chat = ChatOpenAI(
        base_url=f"{whole.url}/v1", api_key="none", model="sim-model", max_completion_tokens=8
    )
    text = chat.invoke("Say something.").content
    assert text
    assert "".join(str(part.content) for part in chat.stream("Say something.")) == text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_works_streaming_and_not(whole: Whole) -> None:
    def curl(**fields: object) -> str:
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": "sim-model", "messages": messages, "max_tokens": 3, **fields})
        url = f"{whole.url}/v1/chat/completions"
        command = ["curl", "-sN", url, "-H", "content-type: application/json", "-d", body]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout

    assert json.loads(curl())["choices"][0]["message"]["content"]
    events = curl(stream=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])


def test_every_metric_is_in_the_readme(whole: Whole) -> None:
    text = whole.client.get("/metrics").text
    names = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE kvroute_")}
    names = {name for name in names if not name.endswith("_created")}
    readme = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
    assert sorted(name for name in names if f"`{name}`" not in readme) == []


def test_a_replica_can_be_asked_to_tokenize() -> None:
    with whole_way(2, gateway=()) as running:
        text = prompt("remote")
        running.holds(text, 256)
        warm = running.chat(text)
        cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(warm.headers["x-kvroute-matched-tokens"]) == cached > 0
        assert 'kvroute_prompts_total{source="replica"}' in running.client.get("/metrics").text


def test_each_rank_is_a_candidate_of_its_own() -> None:
    with whole_way(1, replica=("--ranks", "2")) as running:
        text = prompt("ranked")
        running.holds(text, 256)
        for _ in range(4):
            warm = running.chat(text)
            cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(warm.headers["x-kvroute-matched-tokens"]) == cached > 0
        ready = running.ready()["replicas"]
        assert [each["ranks"] for each in ready.values()] == [[0, 1]]


def test_a_killed_replica_costs_no_request_and_its_entries_are_gone_when_it_is_back() -> None:
    first, first_urls = start_replicas(1)
    second, second_urls = start_replicas(1)
    gateway, url = start_gateway([*first_urls, *second_urls], *tokenizer_options())
    port = first_urls[0].rsplit(":", 1)[1]
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            running = Whole([*first_urls, *second_urls], url, client, gateway)
            running.wait_for_index()
            text = prompt("survivor")
            running.holds(text, 256)
            stop = threading.Event()
            statuses: list[int] = []

            def load() -> None:
                with httpx.Client(base_url=url, timeout=20) as other:
                    mine = Whole([], url, other, gateway)
                    while not stop.is_set():
                        statuses.append(mine.chat(text).status_code)

            threads = [threading.Thread(target=load) for _ in range(4)]
            for thread in threads:
                thread.start()
            running.wait(lambda: len(statuses) > 20)
            first.kill()
            seen = len(statuses)
            running.wait(lambda: len(statuses) > seen + 50)
            first, _ = start_replicas(1, "--port", port)
            running.wait_for_index()
            stop.set()
            for thread in threads:
                thread.join(20)
            # A request that is with a replica when it dies is sent again elsewhere.
            assert set(statuses) == {200}
            warm = running.chat(text)
            cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(warm.headers["x-kvroute-matched-tokens"]) == cached
    finally:
        for process in (gateway, first, second):
            process.end()


def test_without_redis_it_serves_on_load_alone_and_recovers_by_itself() -> None:
    with whole_way(2) as running:
        text = prompt("redis")
        running.holds(text, 256)
        for server in valkey_children(running.gateway.popen.pid):
            os.kill(server, signal.SIGKILL)
        for _ in range(20):
            assert running.chat(text).status_code == 200
        running.wait_for_index()
        running.holds(text, 256)


def test_a_killed_gateway_leaves_no_valkey_behind() -> None:
    replicas, urls = start_replicas(1)
    try:
        gateway, _ = start_gateway(urls, *tokenizer_options())
        servers = valkey_children(gateway.popen.pid)
        assert servers
        gateway.kill()
        with whole_way(1) as running:  # something to wait with
            running.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 5)
    finally:
        replicas.end()


def test_sigterm_ends_the_gateway_cleanly() -> None:
    replicas, urls = start_replicas(1)
    try:
        gateway, _ = start_gateway(urls, *tokenizer_options())
        assert gateway.end() == 0
    finally:
        assert replicas.end() == 0
