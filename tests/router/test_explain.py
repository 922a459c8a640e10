"""POST /admin/explain: it says what would be done, is right, and changes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from cache_index.types import Holder
from router.policy import POLICIES
from router.prompt import CHAT_PATH, COMPLETIONS_PATH
from tests.router.support import (
    MODEL,
    Running,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    answer_ok,
    chat,
    json_answer,
    running_gateway,
    scripted,
)

TOKEN = "s3cret-admin"
AUTH = {"authorization": f"Bearer {TOKEN}"}


def completion(tokens: int = 130) -> bytes:
    return json.dumps({"model": MODEL, "prompt": list(range(tokens))}).encode()


@asynccontextmanager
async def fleet(
    count: int, **settings: Any
) -> AsyncIterator[tuple[Running, list[ScriptedReplica]]]:
    async with scripted(*[answer_ok] * count) as replicas:
        held = {Holder(each.name, 0, "device"): 2 * at for at, each in enumerate(replicas)}
        index = TaughtIndex(lambda root, hashes: held)
        given = {"admin_token": TOKEN, "index": index, **settings}
        async with running_gateway(*replicas, **given) as running:
            yield running, replicas


async def explain(running: Running, body: bytes, path: str = CHAT_PATH, **headers: str) -> Any:
    sent = {**AUTH, **headers}
    return await running.client.post(
        "/admin/explain", params={"path": path}, content=body, headers=sent
    )


def state(running: Running) -> tuple[Any, ...]:
    """All that a decision changes, and what is counted of one."""
    gateway = running.gateway
    ranks = {
        key: (load.running, load.queued_tokens, load.prefill, load.queue_s())
        for key, load in gateway.load.ranks().items()
        if load.running or load.queued_tokens
    }
    breakers = {
        name: (copy.copy(each.breaker.state), each.inflight.running, each.inflight.recent)
        for name, each in gateway.fleet.replicas.items()
    }
    counted = [
        line
        for line in generate_latest(gateway.registry).decode().splitlines()
        if line.startswith(("kvroute_requests", "kvroute_prompt", "kvroute_matched"))
        and "/admin" not in line
    ]
    load = gateway.load
    return load.turn, load.mean_prefill_s, ranks, breakers, counted, len(gateway.receipts)


@pytest.mark.parametrize("policy", POLICIES)
async def test_what_it_says_is_what_is_then_done(policy: str) -> None:
    async with fleet(4, policy=policy) as (running, replicas):
        for number in range(12):
            body = completion(130 + number)
            told = (await explain(running, body, COMPLETIONS_PATH)).json()
            answer = await running.post(body, path=COMPLETIONS_PATH)
            assert told["chosen"]["replica"] == answer.headers["x-kvroute-replica"]
            matched = int(answer.headers["x-kvroute-matched-tokens"])
            assert told["chosen"]["matched_tokens"] == matched
            sent = answer.headers["x-kvroute-request-id"]
            await running.becomes_idle()
            done = (await running.client.get(f"/admin/decisions/{sent}", headers=AUTH)).json()
            for each in told["candidates"]:
                each.pop("trust")
            for name in ("candidates", "why", "roots", "policy", "unit_tokens", "request"):
                assert told[name] == done[name], name
        assert sum(len(each.seen) for each in replicas) == 12


async def test_it_sends_nothing_and_changes_nothing() -> None:
    async with fleet(3, policy="round_robin") as (running, replicas):
        await running.post(completion(), path=COMPLETIONS_PATH)
        await running.becomes_idle()
        before = state(running)
        for _ in range(5):
            told = (await explain(running, completion(), COMPLETIONS_PATH)).json()
            assert told["chosen"]["replica"] == replicas[1].name
        assert state(running) == before
        assert sum(len(each.seen) for each in replicas) == 1


async def test_it_is_refused_as_the_request_itself_would_be() -> None:
    async with fleet(1, body_timeout_s=0.2) as (running, replicas):
        for body, path, status, says in (
            (b"{", CHAT_PATH, 400, "not valid JSON"),
            (chat(model="none"), CHAT_PATH, 404, MODEL),
            (b'{"model": "sim"}', CHAT_PATH, 400, "`messages` is required"),
            (chat(), "/v1/nothing", 400, CHAT_PATH),
            (chat(), "/v1/files", 400, "No explanations for '/v1/files'"),
        ):
            answer = await explain(running, body, path)
            assert (answer.status_code, says in answer.text) == (status, True), answer.text
            assert "message" in answer.json()["error"]
        running.gateway.fleet.drain(running.gateway.fleet.replicas[replicas[0].name])
        assert (await explain(running, chat())).json()["error"]["code"] == "no_replica"


async def test_it_says_who_is_no_candidate_and_why() -> None:
    async with fleet(3, allow_pin=True) as (running, replicas):
        first, second, third = (each.name for each in replicas)
        running.gateway.fleet.drain(running.gateway.fleet.replicas[first])
        replicas[1].models = ["other"]
        async with asyncio.timeout(5):
            while "other" not in running.gateway.fleet.replicas[second].models:
                await asyncio.sleep(0.005)
        told = (await explain(running, chat())).json()
        assert [each["replica"] for each in told["candidates"]] == [third]
        assert told["left_out"] == {first: "draining", second: f"it does not serve '{MODEL}'"}
        told = (await explain(running, chat(), **{"x-kvroute-pin": third})).json()
        assert told["why"] == f"{third}/0 is the only candidate: pinned by x-kvroute-pin"


async def test_the_admins_token_is_not_shown_to_a_replica_that_tokenizes() -> None:
    async def tokenize(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(json_answer({"tokens": list(range(40))}))

    async with scripted(tokenize) as (replica,):
        replica.unrecorded = set()
        async with running_gateway(replica, admin_token=TOKEN) as running:
            told = (await explain(running, chat())).json()
            assert told["request"]["tokens_from"] == "replica"
            assert told["request"]["prompt_tokens"] == 40
            own = {"x-kvroute-client-authorization": "Bearer own"}
            await explain(running, chat(), **own)
            assert [seen.target for seen in replica.seen] == ["/tokenize"] * 2
            given = [seen.header("authorization") for seen in replica.seen]
            assert given == [None, "Bearer own"]
            assert all(TOKEN not in str(seen.headers) for seen in replica.seen)
