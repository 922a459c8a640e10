"""Receipts: what is kept of a request, what became of it, and what must never be in there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from cache_index.identity import ModelIdentity, Root
from cache_index.types import Holder
from loadgen.tokenizer import default_folder
from tests.router.support import (
    MODEL,
    SSE_HEAD,
    Running,
    ScriptedReplica,
    Seen,
    Streams,
    TaughtIndex,
    answer_ok,
    chat,
    chunk,
    json_answer,
    running_gateway,
    scripted,
)

TOKEN = "s3cret-admin"
AUTH = {"authorization": f"Bearer {TOKEN}"}
USAGE = {"prompt_tokens": 130, "total_tokens": 131, "prompt_tokens_details": {"cached_tokens": 96}}


def completion(tokens: int = 130, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": list(range(tokens)), **fields}).encode()


def everywhere(units: int, *replicas: ScriptedReplica) -> TaughtIndex:
    held = {Holder(each.name, 0, "device"): units for each in replicas}
    return TaughtIndex(lambda root, hashes: held)


@asynccontextmanager
async def watched(*replicas: ScriptedReplica | str, **settings: Any) -> AsyncIterator[Running]:
    async with running_gateway(*replicas, admin_token=TOKEN, **settings) as running:
        yield running


async def get(running: Running, path: str) -> Any:
    return await running.client.get(f"/admin/{path}", headers=AUTH)


async def receipt(running: Running, request_id: str, state: str | None = None) -> dict[str, Any]:
    """The receipt of a request, once it is in this state."""
    async with asyncio.timeout(5):
        while True:
            answer = await get(running, f"decisions/{quote(request_id, safe='')}")
            assert answer.status_code == 200, answer.text
            told: dict[str, Any] = answer.json()
            if state in (None, told["state"]):
                return told
            await asyncio.sleep(0.005)


async def with_usage(
    seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """As vLLM answers when it is asked for usage: in the body, or in the last chunk but one."""
    if b'"stream": true' not in seen.body:
        writer.write(json_answer({"choices": [{"text": "prompt_tokens"}], "usage": USAGE}))
        return
    writer.write(SSE_HEAD + chunk(b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'))
    await writer.drain()
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    writer.write(chunk(b"data: " + usage + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_receipt_holds_the_decision_and_what_the_engine_said(stream: bool) -> None:
    async with scripted(with_usage, with_usage) as (first, second):
        index = everywhere(7, second)
        async with watched(first, second, index=index, policy="cost") as running:
            sent = {"x-request-id": "mine-1"}
            body = completion(stream=stream, cache_salt="tenant-salt")
            answer = await running.post(body, path="/v1/completions", headers=sent)
            told = await receipt(running, "mine-1", "answered")
            assert answer.headers["x-kvroute-replica"] == second.name
            asked = told["request"]
            assert (asked["path"], asked["model"]) == ("/v1/completions", MODEL)
            assert (asked["prompt_tokens"], asked["tokens_from"]) == (130, "given")
            assert (asked["streaming"], asked["tokens_known"]) == (stream, True)
            (root,) = told["roots"]
            digest = Root(ModelIdentity(MODEL), "", "tenant-salt").digest()
            assert (root["model"], root["adapter"]) == (MODEL, None)
            assert root["digest"] == f"{digest:016x}"
            held = {"replica": second.name, "rank": 0, "tier": "device"}
            credit = {"matched_units": 7, "matched_tokens": 112, "credited": True}
            assert root["holders"] == [{**held, **credit}]
            assert (told["policy"], told["unit_tokens"]) == ("cost", 16)
            assert [each["replica"] for each in told["candidates"]] == [first.name, second.name]
            assert [each["uncached_tokens"] for each in told["candidates"]] == [130, 18]
            assert told["chosen"] == told["candidates"][1]
            assert told["chosen"]["score"] == told["chosen"]["predicted_s"]["total"]
            assert told["why"].endswith(f"{second.name}/0 holds 112 of 130 tokens")
            (attempt,) = told["attempts"]
            assert (attempt["replica"], attempt["outcome"]) == (second.name, "answered")
            happened = told["outcome"]
            assert (happened["status"], happened["replica"]) == (200, second.name)
            assert (happened["retries"], happened["error"]) == (0, None)
            assert (happened["prompt_tokens"], happened["cached_tokens"]) == (130, 96)
            assert happened["matched_minus_cached_tokens"] == 16
            assert 0 < happened["routing_s"] < happened["first_byte_s"] <= happened["total_s"]
            error_s = happened["predicted_minus_true_s"]
            if stream:
                total_s = told["chosen"]["predicted_s"]["total"]
                assert error_s == pytest.approx(total_s - happened["first_token_s"])
            else:
                assert error_s is happened["first_token_s"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_may_come_in_two_pieces_cut_anywhere(stream: bool) -> None:
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    done = b"data: [DONE]\n\n"
    positions = range(usage.index(b'"usage"'), len(usage), 3)

    async def in_pieces(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        at = int(seen.header("x-at") or 0)
        data = (b"data: " + usage + b"\n\n") if stream else usage
        at += len(b"data: ") if stream else 0
        writer.write(SSE_HEAD)
        for piece in (data[:at], data[at:], *([done] if stream else [])):
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")

    async with scripted(in_pieces) as (replica,), watched(replica) as running:

        async def told(at: int) -> tuple[int, int]:
            sent = {"x-request-id": f"at-{at}", "x-at": str(at)}
            await running.post(completion(stream=stream), path="/v1/completions", headers=sent)
            happened = (await receipt(running, f"at-{at}", "answered"))["outcome"]
            return happened["prompt_tokens"], happened["cached_tokens"]

        found = await asyncio.gather(*map(told, positions))
        assert found == [(130, 96)] * len(positions)
        metrics = (await running.client.get("/metrics")).text
        assert f"kvroute_cached_tokens_total {96 * len(positions)}.0" in metrics


async def test_nothing_secret_is_in_a_receipt() -> None:
    said = "my secret prompt"
    async with scripted(with_usage) as (replica,):
        async with watched(replica, tokenizer=default_folder()) as running:
            headers = {"authorization": "Bearer client-key", "x-request-id": "quiet"}
            salted = {"messages": [{"role": "user", "content": said}], "cache_salt": "tenant-salt"}
            await running.post(chat(**salted), headers=headers)
            await running.post(chat(**salted), headers={"x-request-id": "again"})
            await running.post(chat(cache_salt="other"), headers={"x-request-id": "other"})
            told = await receipt(running, "quiet", "answered")
            assert told["request"]["tokens_from"] == "local"
            listed = (await get(running, "decisions")).text
            for text in (json.dumps(told), listed):
                for secret in (said, "tenant-salt", "client-key", TOKEN):
                    assert secret not in text
            digests = [
                (await receipt(running, name))["request"]["salt_digest"]
                for name in ("quiet", "again", "other")
            ]
            assert digests[0] == digests[1] != digests[2]


async def test_retries_are_in_the_receipt_each_with_its_reason() -> None:
    async def busy(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({}, "503 Service Unavailable"))

    async def hang_up(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        raise ConnectionError

    async with scripted(busy, hang_up, answer_ok) as replicas:
        first, second, third = replicas
        index = TaughtIndex(
            lambda root, hashes: {
                Holder(first.name, 0, "device"): 8,
                Holder(second.name, 0, "device"): 7,
            }
        )
        given = {"policy": "prefix_only", "retry_budget": 1.0, "index": index}
        async with watched(*replicas, **given) as running:
            sent = {"x-request-id": "tried"}
            await running.post(completion(), path="/v1/completions", headers=sent)
            told = await receipt(running, "tried", "answered")
            tried = [(each["replica"], each["outcome"]) for each in told["attempts"]]
            assert tried == [
                (first.name, "refused"),
                (second.name, "unavailable"),
                (third.name, "answered"),
            ]
            assert told["attempts"][0]["reason"] == "status 503"
            assert "closed the connection" in told["attempts"][1]["reason"]
            assert "longest cached prefix" in told["attempts"][0]["why"]
            assert told["outcome"]["retries"] == 2
            assert told["why"] == f"{third.name}/0 is the only candidate"


async def test_a_request_that_fails_says_where_it_was_tried_last() -> None:
    replica = ScriptedReplica()
    await replica.start()
    async with watched(replica, probe_interval_s=30) as running:
        await replica.stop()
        assert (await running.post(chat(), headers={"x-request-id": "lost"})).status_code == 503
        told = await receipt(running, "lost", "failed")
        (attempt,) = told["attempts"]
        assert (attempt["replica"], attempt["outcome"]) == (replica.name, "unavailable")
        happened = told["outcome"]
        assert (happened["status"], happened["error"]) == (503, "no_replica")
        assert (happened["replica"], happened["retries"]) == (None, 0)
        await running.post(chat(model="nobody's"), headers={"x-request-id": "unknown"})
        told = await receipt(running, "unknown", "refused")
        assert (told["request"]["model"], told["why"][-15:]) == ("nobody's", "model_not_found")
        assert (await running.post(b"{", headers={"x-request-id": "bad"})).status_code == 400
        told = await receipt(running, "bad", "refused")
        assert (told["candidates"], told["chosen"], told["attempts"]) == ([], None, [])
        assert told["why"] == "refused before a replica was chosen: invalid_request"


async def test_a_cut_stream_and_a_client_that_leaves_are_told_apart() -> None:
    async def cut(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        raise ConnectionError

    streams = Streams()
    async with scripted(cut) as (cutting,), scripted(streams) as (streaming,):
        async with watched(cutting) as running:
            with pytest.raises(httpx.RemoteProtocolError):
                await running.post(chat(stream=True), headers={"x-request-id": "cut"})
            told = await receipt(running, "cut", "cut")
            assert (told["outcome"]["status"], told["outcome"]["error"]) == (200, "answer_cut")
            assert told["outcome"]["replica"] == cutting.name
            assert told["attempts"][0]["outcome"] == "cut"
        async with watched(streaming) as running:
            sent = {"x-request-id": "left"}
            async with running.client.stream(
                "POST", "/v1/chat/completions", content=chat(stream=True), headers=sent
            ) as answer:
                parts = answer.aiter_bytes()
                await anext(parts)
                told = await receipt(running, "left")
                assert (told["state"], told["outcome"]["replica"]) == ("running", streaming.name)
                assert told["outcome"]["first_token_s"] is not None
                (listed,) = (await get(running, "decisions")).json()["decisions"]
                assert (listed["request_id"], listed["state"]) == ("left", "running")
            told = await receipt(running, "left", "client_left")
            assert (told["outcome"]["status"], told["outcome"]["error"]) == (499, None)


async def test_the_ring_is_bounded_and_says_what_to_do_about_what_it_forgot() -> None:
    async with scripted(answer_ok) as (replica,):
        async with watched(replica, receipts=3) as running:
            for number in range(5):
                await running.post(chat(), headers={"x-request-id": f"r{number}"})
            await running.becomes_idle()
            listed = (await get(running, "decisions")).json()
            assert [each["request_id"] for each in listed["decisions"]] == ["r4", "r3", "r2"]
            assert (listed["kept"], listed["limit"]) == (3, 3)
            forgotten = await get(running, "decisions/r1")
            error = forgotten.json()["error"]
            assert (forgotten.status_code, error["code"]) == (404, "receipt_not_found")
            assert "last 3 requests (setting `receipts`)" in error["message"]
            assert error["param"] == "request_id"


async def test_of_an_id_used_twice_the_latest_is_shown_with_how_many() -> None:
    async with scripted(answer_ok) as (replica,):
        async with watched(replica) as running:
            odd = "a/b?c#d%2F"
            for path in ("/v1/chat/completions", "/v1/embeddings"):
                await running.post(chat(), path=path, headers={"x-request-id": odd})
            await running.becomes_idle()
            told = await receipt(running, odd)
            assert (told["requests_with_this_id"], told["request_id"]) == (2, odd)
            assert told["request"]["path"] == "/v1/embeddings"
            assert told["request"]["tokens_known"] is False


async def test_lists_can_be_narrowed() -> None:
    async with scripted(answer_ok, answer_ok) as (first, second):
        second.models = [MODEL, "other"]
        async with watched(first, second) as running:
            for model in (MODEL, MODEL, "other", "unknown"):
                await running.post(chat(model=model))
            await running.becomes_idle()

            async def listed(query: str) -> list[dict[str, Any]]:
                return list((await get(running, f"decisions?{query}")).json()["decisions"])

            assert len(await listed("")) == 4
            assert len(await listed("limit=2")) == 2
            assert {each["model"] for each in await listed("model=other")} == {"other"}
            named = await listed(f"replica={first.name}")
            assert [each["replica"] for each in named] == [first.name]
            for wrong in ("limit=0", "limit=1001", "limit=x"):
                answer = await get(running, f"decisions?{wrong}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_receipts_can_be_off() -> None:
    async with scripted(with_usage) as (replica,):
        async with watched(replica, receipts=0) as running:
            answer = await running.post(completion(), path="/v1/completions")
            assert answer.status_code == 200
            await running.becomes_idle()
            assert (await get(running, "decisions")).json()["decisions"] == []
            forgotten = await get(running, "decisions/x")
            assert forgotten.status_code == 404
            assert "`receipts` is 0" in forgotten.json()["error"]["message"]


async def test_receipts_are_for_those_with_the_token() -> None:
    async with scripted(answer_ok) as (replica,):
        async with watched(replica) as running:
            for method, path in (("GET", "decisions"), ("GET", "decisions/x"), ("POST", "explain")):
                answer = await running.client.request(method, f"/admin/{path}")
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_admin_token"
        async with running_gateway(replica) as running:
            assert (await get(running, "decisions")).json()["error"]["code"] == "admin_disabled"
