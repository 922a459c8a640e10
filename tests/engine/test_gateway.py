"""`kvroute serve` in front of one real vLLM: what it predicts is what the engine then reuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.gateway import (
    CHAT,
    Answer,
    Gateway,
    ask,
    ask_known,
    chat,
    eventually,
    prose,
    until_known,
)
from tests.engine.replica import BLOCK_TOKENS, MODEL, Replica

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module", params=["tokenizer folder", "replica's tokenizer"])
def gateway(
    request: pytest.FixtureRequest, replica: Replica, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = replica.model_folder if request.param == "tokenizer folder" else None
    with Gateway(tmp_path_factory.mktemp("gateway"), [replica.url], folder) as running:
        yield running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a prompt that no other test shares."""
    return str(request.node.name)


def assert_new(answer: Answer) -> None:
    assert (answer.matched, answer.cached) == (0, 0)


def assert_whole_hit(answer: Answer) -> None:
    assert answer.matched == answer.cached == answer.most > 0


def test_a_repeated_chat_prompt_is_a_hit_of_the_predicted_length(
    gateway: Gateway, name: str
) -> None:
    body = chat(prose(name, 60))
    first = ask(gateway.url, body)
    assert_new(first)
    assert 700 < first.prompt < 1400
    again = ask_known(gateway.url, body)
    assert_whole_hit(again)


def test_the_model_makes_sense(gateway: Gateway) -> None:
    """The weights survived their conversion, and the chat template is the model's own."""
    system = "You are a helpful assistant."
    answer = ask(gateway.url, chat(system, "What is the capital of France?", max_tokens=12))
    assert "Paris" in answer.text


def test_a_shared_beginning_is_a_hit_of_that_part(gateway: Gateway, name: str) -> None:
    system = prose(name, 30)
    assert_new(ask(gateway.url, chat(system, "The first question.")))
    assert_whole_hit(ask_known(gateway.url, chat(system, "The first question.")))
    questions = (chat(system, prose(f"question {i}", 20)) for i in itertools.count())
    other = until_known(lambda: ask(gateway.url, next(questions)))
    assert other.matched == other.cached
    assert 0 < other.cached < other.most


def test_another_salt_shares_nothing(gateway: Gateway, name: str) -> None:
    ours = chat(prose(name, 20), cache_salt="ours")
    assert_new(ask(gateway.url, ours))
    assert_whole_hit(ask_known(gateway.url, ours))
    assert_new(ask(gateway.url, {**ours, "cache_salt": "theirs"}))
    unsalted = {key: value for key, value in ours.items() if key != "cache_salt"}
    assert_new(ask(gateway.url, unsalted))


@pytest.mark.parametrize("tokens", [8 * BLOCK_TOKENS, 8 * BLOCK_TOKENS + 1])
def test_a_prompt_of_token_ids_is_a_hit_but_for_its_last_token(
    gateway: Gateway, replica: Replica, name: str, tokens: int
) -> None:
    body = {"model": MODEL, "prompt": prose(name, 60), "max_tokens": 1, "temperature": 0}
    asked = httpx.post(f"{replica.url}/tokenize", json=body, timeout=30)
    body["prompt"] = asked.json()["tokens"][:tokens]
    assert_new(ask(gateway.url, body, COMPLETIONS))
    again = ask_known(gateway.url, body, COMPLETIONS)
    assert again.prompt == tokens
    assert_whole_hit(again)


def test_a_text_completion_is_a_hit_too(gateway: Gateway, name: str) -> None:
    body = {"model": MODEL, "prompt": prose(name, 20), "max_tokens": 1, "temperature": 0}
    assert_new(ask(gateway.url, body, COMPLETIONS))
    assert_whole_hit(ask_known(gateway.url, body, COMPLETIONS))


def test_an_answer_of_the_engine_is_part_of_the_next_prompt(gateway: Gateway, name: str) -> None:
    """Blocks that decoding filled are announced like those of a prefill."""
    body = chat(prose(name, 10), "Count from one to thirty.", max_tokens=80, ignore_eos=True)
    first = ask(gateway.url, body)
    follow_up = {"role": "assistant", "content": first.text}
    messages = [*body["messages"], follow_up, {"role": "user", "content": "Go on."}]
    second = ask_known(gateway.url, {**body, "messages": messages, "max_tokens": 1})
    assert second.matched == second.cached > first.prompt


def test_a_stream_arrives_as_it_is_made(gateway: Gateway, replica: Replica, name: str) -> None:
    body = chat(prose(name, 10), "Tell me a story.", max_tokens=60, ignore_eos=True)
    whole = ask(gateway.url, body)
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    def streamed() -> Answer:
        with httpx.stream("POST", f"{gateway.url}{CHAT}", json=body, timeout=120) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = filter(None, answer.iter_lines())
            events = [next(lines)]
            assert replica.requests() == (1, 0), "at the first event the engine was already done"
            events += lines
        assert events.pop() == "data: [DONE]"
        return streamed_answer(events, int(answer.headers["x-kvroute-matched-tokens"]))

    again = until_known(streamed)
    assert_whole_hit(again)
    assert again.text == whole.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_receipt_says_what_the_engine_then_reused(
    gateway: Gateway, name: str, stream: bool
) -> None:
    body = chat(prose(name, 40))
    ask(gateway.url, body)
    whole = ask_known(gateway.url, body)
    foretold = gateway.ask_admin("explain", body)
    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    sent = httpx.post(f"{gateway.url}{CHAT}", json={**body, **usage}, timeout=120)
    request_id = sent.headers["x-kvroute-request-id"]

    def ended() -> bool:
        return bool(gateway.ask_admin(f"decisions/{request_id}")["state"] == "answered")

    assert eventually(ended, 5)
    told = gateway.ask_admin(f"decisions/{request_id}")
    chosen, happened = told["chosen"], told["outcome"]
    assert chosen["matched_tokens"] == happened["cached_tokens"] == whole.cached > 0
    assert chosen["matched_tokens"] == foretold["chosen"]["matched_tokens"]
    assert told["request"]["prompt_tokens"] == happened["prompt_tokens"] == whole.prompt
    assert happened["matched_minus_cached_tokens"] == 0
    assert (happened["predicted_minus_true_s"] is not None) == stream
    (root,) = told["roots"]
    (held,) = root["holders"]
    assert held["matched_tokens"] == whole.cached


def streamed_answer(events: list[str], matched: int) -> Answer:
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    usage = chunks[-1]["usage"]
    return Answer(
        matched=matched,
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        prompt=usage["prompt_tokens"],
        text="".join(delta.get("content") or "" for delta in deltas),
    )
