"""Engines that want an API key: what the gateway asks with, passes on, and never shows."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import load_settings
from router.errors import ConfigError
from tests.router.support import (
    ScriptedReplica,
    Seen,
    answer_ok,
    json_answer,
    running_gateway,
    scripted,
)
from tests.whole import start_gateway, start_replicas, whole_way

KEY = "sk-engine-1"
ENGINE = ("--api-key", KEY)
REPLICA = [{"url": "http://a:8000"}]
CHAT = {
    "model": "sim-model",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hi"}],
}


class Guarded(ScriptedReplica):
    """Answers questions under /v1 only to those who carry its key; keeps what it was asked with."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self.questions: list[Seen] = []

    def _control(self, seen: Seen) -> bytes:
        self.questions.append(seen)
        guarded = seen.target.startswith("/v1")
        if guarded and seen.header("authorization") != f"Bearer {self._key}":
            return json_answer({"error": "Unauthorized"}, "401 Unauthorized")
        if seen.target == "/tokenize":
            return json_answer({"tokens": [1, 2, 3]})
        return super()._control(seen)


async def states(running: Any) -> dict[str, Any]:
    content: dict[str, Any] = (await running.client.get("/readyz")).json()["replicas"]
    return content


async def test_a_replica_that_wants_a_key_says_which_setting_gives_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = Guarded("right")
    await replica.start()
    async with running_gateway(replica) as running:
        state = (await states(running))[replica.name]
        assert (state["state"], state["healthy"]) == ("down", False)
        assert "401: it wants an API key; set replica_api_key" in state["reason"]
        await asyncio.sleep(1.5)  # and again when it is asked again, but that is said once
        told = [each.getMessage() for each in caplog.records if each.name == "kvroute.health"]
        assert told == [f"replica {replica.name}: down {state['reason']}"]
    async with running_gateway(replica, replica_api_key="wrong") as running:
        state = (await states(running))[replica.name]
        assert "does not take the API key it was given" in state["reason"]
        assert "wrong" not in json.dumps(state)
    await replica.stop()


async def test_each_replica_may_have_a_key_of_its_own() -> None:
    common, own = Guarded("common"), Guarded("own")
    await common.start()
    await own.start()
    listed = [{"url": common.url}, {"url": own.url, "api_key": "own"}]
    async with running_gateway(replicas=listed, replica_api_key="common") as running:
        assert [each["state"] for each in (await states(running)).values()] == ["up", "up"]
    await common.stop()
    await own.stop()


async def test_tokenize_is_asked_with_the_clients_key_or_else_with_the_gateways() -> None:
    replica = Guarded("k")
    await replica.start()
    async with running_gateway(replica, replica_api_key="k") as running:
        body = {"model": "sim", "prompt": "some text"}
        for sent in ({"authorization": "Bearer client"}, {}):
            await running.client.post("/v1/completions", json=body, headers=sent)
        asked = [each for each in replica.questions if each.target == "/tokenize"]
        assert [each.header("authorization") for each in asked] == ["Bearer client", "Bearer k"]
        # What is the client's passes as it is, and nothing is added to it.
        passed = [each.header("authorization") for each in replica.seen]
        assert passed == ["Bearer client", None]
    await replica.stop()


async def test_the_key_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with scripted(answer_ok) as (replica,):
        listed = [{"url": replica.url, "api_key": KEY}]
        given = {"replica_api_key": f"{KEY}-2", "admin_token": "t"}
        async with running_gateway(replicas=listed, **given) as running:
            admin = {"authorization": "Bearer t"}
            shown = [
                (await running.client.get(path, headers=admin)).text
                for path in ("/readyz", "/metrics", "/admin/replicas", "/openapi.json")
            ]
            joined = {"url": f"{replica.url}/x", "name": "x", "api_key": f"{KEY}-3"}
            answer = await running.client.post("/admin/replicas", json=joined, headers=admin)
            assert answer.status_code == 201
            refused = await running.client.post(
                "/admin/replicas",
                json={**joined, "name": "y", "api_key": f"{KEY} 4"},
                headers=admin,
            )
            assert refused.json()["error"]["param"] == "api_key"
            shown += [answer.text, refused.text, caplog.text, repr(running.gateway.settings)]
            shown += [repr(each) for each in running.gateway.fleet.replicas.values()]
            assert not [text for text in shown if KEY in text]


def test_the_key_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    settings = load_settings(replicas=REPLICA, replica_api_key_file=path)
    assert settings.replica_api_key is not None
    assert settings.replica_api_key.get_secret_value() == KEY
    with pytest.raises(ConfigError, match="give one of them"):
        load_settings(replicas=REPLICA, replica_api_key_file=path, replica_api_key="x")
    for content in (b"", b"two words", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"replica_api_key_file: .*key") as refused:
            load_settings(replicas=REPLICA, replica_api_key_file=path)
        assert "two words" not in str(refused.value)


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_REPLICA_API_KEY", "")
    assert load_settings(replicas=REPLICA).replica_api_key is None


@pytest.mark.slow
def test_the_whole_way_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probed, tokenized by the replica, matched by its events; the client's own key decides."""
    monkeypatch.setenv("KVROUTE_REPLICA_API_KEY", KEY)
    monkeypatch.setenv("KVROUTE_RENDER_TIMEOUT_S", "5")
    with whole_way(2, replica=ENGINE, gateway=()) as whole:
        refused = whole.chat("hi")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        whole.client.headers["authorization"] = f"Bearer {KEY}"
        text = " ".join(f"number {number} stays;" for number in range(80))
        assert whole.chat(text).status_code == 200
        whole.holds(text, 256)
        assert len(whole.client.get("/v1/models").json()["data"]) == 1


@pytest.mark.slow
def test_without_the_key_the_whole_way_says_what_is_missing() -> None:
    replicas, urls = start_replicas(1, *ENGINE)
    try:
        gateway, url = start_gateway(urls)
        try:
            with httpx.Client(base_url=url, timeout=20) as client:
                ready = client.get("/readyz")
                (state,) = ready.json()["replicas"].values()
                assert ready.status_code == 503 and "set replica_api_key" in state["reason"]
                answer = client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 503
        finally:
            gateway.end()
    finally:
        replicas.end()


@pytest.mark.slow
async def test_an_sglang_engine_guards_more_and_is_asked_with_the_key_everywhere() -> None:
    process, (url,) = await asyncio.to_thread(start_replicas, 1, "--flavor", "sglang", *ENGINE)
    try:
        async with running_gateway(url, replica_api_key=KEY) as running:
            (state,) = (await states(running)).values()
            assert (state["state"], state["kind"]) == ("up", "sglang")
            assert len(running.index.specs) == 1  # /server_info was answered
        async with running_gateway(url) as running:
            (state,) = (await states(running)).values()
            assert "set replica_api_key" in state["reason"]
    finally:
        process.end()
