"""Over a whole fleet: what is foretold is done, and what a receipt predicts is what engines say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.whole import Whole, start_gateway, start_replicas, tokenizer_options, whole_way

pytestmark = pytest.mark.slow

TOKEN = "s3cret-admin"
AUTH = {"authorization": f"Bearer {TOKEN}"}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVROUTE_ADMIN_TOKEN", TOKEN)
        with whole_way(2, replica=("--ranks", "2")) as running:
            yield running


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "sim-model", "max_tokens": 3, "messages": messages, **fields}


def explained(whole: Whole, asked: dict[str, Any]) -> dict[str, Any]:
    answer = whole.client.post("/admin/explain", json=asked, headers=AUTH)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def receipt(whole: Whole, request_id: str) -> dict[str, Any]:
    """The receipt of a request whose answer is in."""
    told: dict[str, Any] = {}

    def ended() -> bool:
        told.update(whole.client.get(f"/admin/decisions/{request_id}", headers=AUTH).json())
        return bool(told["state"] != "running")

    whole.wait(ended)
    return told


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_foretold_is_done_and_the_engine_agrees(whole: Whole, stream: bool) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for conversation in range(6):
        text = f"conversation {conversation} {stream}: "
        known = 0
        for turn in range(3):
            text += " ".join(f"{conversation}.{turn}.{word}" for word in range(40))
            asked = body(text, **usage)

            def foretold(asked: dict[str, Any] = asked, at_least: int = known) -> bool:
                chosen = explained(whole, asked)["chosen"]
                return bool(chosen["matched_tokens"] >= at_least)

            whole.wait(foretold)
            told = explained(whole, asked)
            answer = whole.client.post(PATH, json=asked)
            done = receipt(whole, answer.headers["x-kvroute-request-id"])
            happened = done["outcome"]
            assert done["state"] == "answered"
            assert (happened["replica"], happened["rank"]) == (
                told["chosen"]["replica"],
                told["chosen"]["rank"],
            )
            matched = done["chosen"]["matched_tokens"]
            assert matched == told["chosen"]["matched_tokens"] == happened["cached_tokens"]
            assert happened["matched_minus_cached_tokens"] == 0
            assert happened["prompt_tokens"] == done["request"]["prompt_tokens"]
            assert (happened["first_token_s"] is not None) == stream
            assert {each["trust"] for each in told["candidates"]} == {"exact"}
            assert len(done["candidates"]) == 4
            # The next turn goes on where the template's last tokens stand now.
            known = (happened["prompt_tokens"] - 16) // 16 * 16
        assert matched > 0


def test_a_killed_replica_is_in_the_receipt_of_the_request_it_cost_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTE_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("KVROUTE_PROBE_INTERVAL_S", "30")
    first, first_urls = start_replicas(1)
    second, second_urls = start_replicas(1)
    gateway, url = start_gateway([*first_urls, *second_urls], *tokenizer_options())
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            running = Whole([*first_urls, *second_urls], url, client, gateway)
            running.wait_for_index()
            first.kill()
            dead = first_urls[0].removeprefix("http://")
            tried: list[dict[str, Any]] = []

            def retried() -> bool:
                answer = running.chat("survives")
                assert answer.status_code == 200
                told = receipt(running, answer.headers["x-kvroute-request-id"])
                tried[:] = told["attempts"]
                return len(tried) == 2

            running.wait(retried)
            assert (tried[0]["replica"], tried[0]["outcome"]) == (dead, "unavailable")
            assert tried[1]["outcome"] == "answered"
    finally:
        for process in (gateway, first, second):
            process.end()
