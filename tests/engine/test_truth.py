"""What the gateway says of a real replica is never more than the truth, whatever happens to it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.gateway import (
    CHAT,
    INDEX_DEADLINE_S,
    Answer,
    Gateway,
    ask,
    ask_known,
    chat,
    eventually,
    prose,
)
from tests.engine.replica import MODEL, Replica
from tests.engine.script import Step, script
from tests.engine.shape import answer_shape, differences
from tests.engine.simulated import Side, simulated_replica

pytestmark = pytest.mark.engine

# How long an idle source is believed.
LEASE_S = 5.0
READY_S = 30.0
MOST_WARM = 0.2
THROUGH = (
    "chat stream with usage",
    "chat stream of n=2",
    "chat n=2",
    "chat logprobs",
    "chat stream with logprobs",
    "chat token ids",
    "chat tools, auto",
    "chat tools, named",
    "chat tools, required, stream",
    "chat response format",
    "completion stream with usage",
    "completion token ids, cold",
    "completion lists of token ids",
    "completion list of texts, n=2",
    "completion echo with logprobs",
    "completion return token ids, stream",
    "messages plain",
    "messages stream",
    "messages tools, forced, stream",
    "messages count",
    "responses plain",
    "responses stream",
    "responses stored",
    "responses continued",
    "responses fetched",
    "tokenize messages",
)


@pytest.fixture(scope="module")
def other(replica: Replica) -> Iterator[Side]:
    """A second place to go to, which knows nothing: a simulated replica of the same model."""
    with simulated_replica(replica.model_folder) as side:
        yield side


@pytest.fixture(scope="module")
def gateway(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with Gateway(folder, [replica.url], replica.model_folder) as running:
        yield running


def warmed(gateway: Gateway, name: str) -> dict[str, object]:
    """A request whose prompt the gateway knows the replica to hold."""
    body = chat(prose(name, 40), max_tokens=1)
    ask(gateway.url, body)
    known = ask_known(gateway.url, body)
    assert known.matched == known.cached == known.most
    return body


def ttft_s(url: str, body: dict[str, object]) -> tuple[float, httpx.Headers]:
    """Seconds to the first text of a stream."""
    began_s = time.monotonic()
    with httpx.stream("POST", f"{url}{CHAT}", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.monotonic() - began_s, answer.headers
    raise AssertionError("no text came")


def test_a_repeated_prompt_of_2k_tokens_answers_in_a_fifth_of_the_time(gateway: Gateway) -> None:
    """A property of the engine, 0.03 where nothing else runs, which the gateway must not spoil."""
    body = chat(prose("a prompt of two thousand tokens", 148), max_tokens=4, ignore_eos=True)
    cold_s, headers = ttft_s(gateway.url, body)
    assert int(headers["x-kvroute-matched-tokens"]) == 0
    known = ask_known(gateway.url, body)
    assert 1900 < known.prompt < 2300
    assert known.matched == known.cached == known.most
    warm_s = min(ttft_s(gateway.url, body)[0] for _ in range(3))
    assert warm_s <= MOST_WARM * cold_s, f"warm {warm_s:.2f} s, cold {cold_s:.2f} s"


def test_a_repeated_prompt_goes_to_its_holder(
    replica: Replica, other: Side, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The gateway saw none of the first requests: events alone have told it."""
    folder = tmp_path_factory.mktemp("two")
    with Gateway(folder, [other.url, replica.url], replica.model_folder) as gateway:
        for holder in (replica.url, other.url):
            body = held_by(holder, gateway)
            for _ in range(4):
                answer = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=60)
                assert answer.headers["x-kvroute-replica"] in holder
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-kvroute-matched-tokens"]) == cached > 600


def held_by(holder: str, gateway: Gateway) -> dict[str, object]:
    """A request that was sent to `holder` alone, and of which the gateway has learned in time.

    What it has not learned of goes anywhere, and is then held there, too: that is another try.
    """
    for wait_s in (0.5, 2.0, INDEX_DEADLINE_S):
        body = chat(prose(f"held by {holder}, told in {wait_s} s", 60), max_tokens=1)
        ask(holder, body)
        time.sleep(wait_s)
        if ask(gateway.url, body).matched:
            return body
    raise AssertionError(f"the gateway does not learn what {holder} holds")


def test_after_a_reset_nothing_is_credited(gateway: Gateway, replica: Replica) -> None:
    body = warmed(gateway, "a prompt before the reset")
    httpx.post(f"{replica.url}/reset_prefix_cache", timeout=30).raise_for_status()
    # vLLM tells of it with its next step only, whoever's request makes it step: until then nobody
    # outside can know.
    ask(replica.url, chat("Anything else.", max_tokens=1))
    assert_no_more_than_the_truth(gateway, body)


def test_after_a_sleep_nothing_is_credited(gateway: Gateway, replica: Replica) -> None:
    body = warmed(gateway, "a prompt before the sleep")
    slept = httpx.post(f"{replica.url}/sleep?level=1", timeout=30)
    assert slept.json() == {"status": "sleeping", "level": 1}
    try:
        # Not asked while it sleeps: the engine would let the request wait without a word.
        assert eventually(lambda: ready(gateway) == 503, READY_S), gateway.log_tail()
        refused = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=30)
        assert refused.status_code == 503
    finally:
        httpx.post(f"{replica.url}/wake_up", timeout=30).raise_for_status()
    assert eventually(lambda: ready(gateway) == 200, READY_S), gateway.log_tail()
    # That it slept is enough to know, though vLLM itself tells with its next step only.
    assert_no_more_than_the_truth(gateway, body)


def ready(gateway: Gateway) -> int:
    return httpx.get(f"{gateway.url}/readyz", timeout=5).status_code


def assert_no_more_than_the_truth(gateway: Gateway, body: dict[str, object]) -> None:
    """One lease later, and once the truth is a whole hit again."""
    time.sleep(LEASE_S)
    first: Answer = ask(gateway.url, body)
    assert (first.matched, first.cached) == (0, 0)
    again = ask_known(gateway.url, body)
    assert again.matched == again.cached == again.most


def test_every_kind_of_request_comes_through_unchanged(gateway: Gateway, replica: Replica) -> None:
    """Tools, logprobs, n=2, token ids, messages, responses: as if asked directly."""
    steps = {step.name: step for step in script(MODEL)}
    chosen = [steps[name] for name in THROUGH]
    # Both find the cache as the other does: emptied, and filled in the same order.
    shapes = []
    for url in (replica.url, gateway.url):
        httpx.post(f"{replica.url}/reset_prefix_cache", timeout=30).raise_for_status()
        shapes.append([answer_shape(send(url, step)) for step in chosen])
    found = [
        f"{step.name}: {line}"
        for step, direct, through in zip(chosen, *shapes, strict=True)
        for line in differences(direct, through)
        if not line.startswith("headers.")
    ]
    assert not found, "\n".join(found)
    assert {shape["status"] for shape in shapes[0]} == {200}


def send(url: str, step: Step) -> httpx.Response:
    # Named, because the gateway names what has no name, and ids are made of it.
    named = {"x-request-id": "a-name"}
    headers = {"content-type": "application/json", **named, **step.headers}
    return httpx.request(
        step.method, f"{url}{step.path}", content=step.content(), headers=headers, timeout=120
    )
