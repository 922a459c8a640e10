"""What a client's request becomes at the replica, and what every ending looks like."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from xxhash import xxh3_128_hexdigest

from cache_index.types import Holder
from router.connection import ClientConnection
from tests.router.support import (
    SSE_HEAD,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    answer_ok,
    chat,
    chunk,
    closed_port,
    json_answer,
    running_gateway,
    scripted,
)

ODD_BODY = (
    b'{ "zeta":1e400,"model":"sim",  "messages":[{"role":"user","content":"\\u0041\\ud83d\\ude00'
    b'\\ud800"}],"dup":1,"dup":2,"n":1.00}\n'
)


async def test_body_reaches_the_replica_byte_for_byte() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(ODD_BODY)
        assert answer.status_code == 200
        assert [seen.body for seen in replica.seen] == [ODD_BODY]


async def test_headers_pass_both_ways_but_for_hop_by_hop_ones() -> None:
    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(json_answer({}, extra="x-engine: yes\r\nkeep-alive: timeout=5\r\n"))

    async with scripted(script) as (replica,), running_gateway(replica) as running:
        sent = {
            "authorization": "Bearer k",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "x-request-id": "abc-1",
            "x-mine": "kept",
            "connection": "keep-alive, x-hop",
            "x-hop": "dropped",
        }
        answer = await running.post(chat(), path="/v1/chat/completions?a=b", headers=sent)
        (seen,) = replica.seen
        assert seen.target == "/v1/chat/completions?a=b"
        for name in ("authorization", "traceparent", "x-request-id", "x-mine"):
            assert seen.header(name) == sent[name]
        assert seen.header("x-hop") is None
        assert seen.header("host") == replica.name
        assert answer.headers["x-engine"] == "yes"
        assert "keep-alive" not in answer.headers
        assert answer.headers["x-kvroute-request-id"] == "abc-1"
        assert answer.headers["x-kvroute-replica"] == replica.name
        assert answer.headers["x-kvroute-matched-tokens"] == "0"


async def test_a_request_without_a_trace_begins_one_under_its_request_id() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat())
        await running.post(chat(), headers={"x-request-id": "mine"})
        traces = [(each.header("traceparent") or "").split("-") for each in replica.seen]
        assert traces[0][1] == answer.headers["x-kvroute-request-id"]
        assert traces[1][1] == xxh3_128_hexdigest(b"mine")
        for version, trace_id, span_id, flags in traces:
            assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, make_traceparent=False) as running:
            await running.post(chat())
            assert replica.seen[0].header("traceparent") is None


async def test_what_a_gateway_behind_this_one_says_of_itself_is_not_passed_on() -> None:
    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        extra = "x-kvroute-replica: inner\r\nX-KVRoute-Matched-Tokens: 5\r\n"
        writer.write(json_answer({}, extra=extra))

    async with scripted(script) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat())
        assert answer.headers.get_list("x-kvroute-replica") == [replica.name]
        assert answer.headers.get_list("x-kvroute-matched-tokens") == ["0"]


async def test_an_unusable_request_id_is_replaced_at_both_ends() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat(), headers={"x-request-id": "two words"})
        made = answer.headers["x-kvroute-request-id"]
        assert replica.seen[0].header("x-request-id") == made
        assert len(made) == 32


async def test_chunks_arrive_as_the_replica_sends_them() -> None:
    go_on = asyncio.Event()

    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        await go_on.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with scripted(script) as (replica,), running_gateway(replica) as running:
        async with running.client.stream(
            "POST", "/v1/chat/completions", content=chat(stream=True)
        ) as answer:
            parts = answer.aiter_bytes()
            assert await anext(parts) == b"data: 1\n\n"
            assert not running.idle()
            go_on.set()
            assert await anext(parts) == b"data: [DONE]\n\n"
        await running.becomes_idle()


async def test_a_dead_replica_is_passed_over_and_gets_nothing_more() -> None:
    async with scripted(answer_ok) as (replica,):
        dead = ScriptedReplica()
        await dead.start()
        async with running_gateway(dead, replica, probe_interval_s=30) as running:
            await dead.stop()
            answers = [await running.post(chat()) for _ in range(4)]
            assert [each.status_code for each in answers] == [200] * 4
            assert {each.headers["x-kvroute-replica"] for each in answers} == {replica.name}
            assert not running.gateway.fleet.replicas[dead.name].healthy
            assert running.idle()


async def test_a_replica_that_comes_back_is_used_again() -> None:
    replica = ScriptedReplica()
    await replica.start()
    async with running_gateway(replica) as running:
        await replica.stop()
        refused = await running.post(chat())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_replica"
        await replica.start(replica.port)
        async with asyncio.timeout(5):
            while (await running.post(chat())).status_code != 200:
                await asyncio.sleep(0.02)
    await replica.stop()


async def test_503_is_tried_elsewhere_and_passed_on_when_there_is_nowhere_else() -> None:
    async def busy(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": "busy"}, "503 Service Unavailable"))

    async with scripted(busy, answer_ok) as (first, second):
        async with running_gateway(first, second) as running:
            answers = [await running.post(chat()) for _ in range(4)]
            assert [each.status_code for each in answers] == [200] * 4
        async with running_gateway(first) as running:
            answer = await running.post(chat())
            assert (answer.status_code, answer.json()) == (503, {"error": "busy"})


async def test_an_error_of_the_engine_passes_unchanged() -> None:
    async def wrong(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"message": "too long"}}, "400 Bad Request"))

    async with scripted(wrong) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat(stream=True))
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
        assert len(replica.seen) == 1


@pytest.mark.parametrize("part", [b"data: 1\n\n", b'data: {"half'])
async def test_a_cut_stream_ends_in_an_error_event_and_an_aborted_transfer(part: bytes) -> None:
    async def cut(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(part))
        await writer.drain()
        writer.transport.abort()

    async with scripted(cut) as (replica,), running_gateway(replica) as running:
        received = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with running.client.stream(
                "POST", "/v1/chat/completions", content=chat(stream=True)
            ) as answer:
                async for data in answer.aiter_bytes():
                    received += data
        assert b"[DONE]" not in received
        event = received.rstrip(b"\n").split(b"\n\n")[-1]
        assert event.startswith(b"event: error\ndata: {")
        error = json.loads(event.removeprefix(b"event: error\ndata: "))["error"]
        assert error["code"] == "answer_cut" and "Send it again" in error["message"]
        await running.becomes_idle()


async def test_a_cut_answer_cannot_pass_for_a_whole_one() -> None:
    async def cut(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.transport.abort()

    async with scripted(cut) as (replica,), running_gateway(replica) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await running.post(chat())
        await running.becomes_idle()


async def test_an_idle_connection_closed_by_the_replica_is_replaced() -> None:
    async def close_after(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(json_answer({"count": len(replica.seen)}))
        await writer.drain()
        if len(replica.seen) == 1:
            # Closed without a word as soon as the next request's bytes arrive.
            await reader.read(1)
            writer.transport.abort()

    async with scripted(close_after) as (replica,), running_gateway(replica) as running:
        first = await running.post(chat())
        second = await running.post(chat())
        assert (first.json(), second.json()) == ({"count": 1}, {"count": 2})


@pytest.mark.parametrize("http", [ClientConnection, "httptools"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_upstream_request(stream: bool, http: Any) -> None:
    arrived = asyncio.Event()

    async def never(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if stream:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        replica.closed.clear()
        arrived.set()
        await reader.read(1)  # returns when the gateway closes

    async with scripted(never) as (replica,), running_gateway(replica, http=http) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = chat(stream=stream)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        async with asyncio.timeout(5):
            await arrived.wait()
            writer.transport.abort()
            await replica.closed.wait()
        await running.becomes_idle()
        metrics = (await running.client.get("/metrics")).text
        assert 'kvroute_requests_total{code="499",route="/v1/chat/completions"} 1.0' in metrics
        assert len(replica.seen) == 1


async def test_a_client_that_does_not_read_slows_the_replica_not_the_memory() -> None:
    written = 0
    blocked = asyncio.Event()

    async def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(chunk(b"x" * 65536))
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                blocked.set()
                await reader.read(1)
                return
            written += 65536

    async with scripted(flood) as (replica,), running_gateway(replica) as running:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", running.port))
        body = chat(stream=True)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        await loop.sock_sendall(sock, head % len(body) + body)
        async with asyncio.timeout(10):
            await blocked.wait()
        assert written < 24 << 20  # kernel buffers of two connections, not 64 MB
        sock.close()
        await running.becomes_idle()


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_request", None),
        (b"[]", 400, "invalid_request", None),
        (b"", 400, "invalid_request", None),
        (b'{"model": "sim\xff"}', 400, "invalid_request", None),
        (b"[" * 100_000, 400, "invalid_request", None),
        (b'{"messages": []}', 400, "invalid_request", "model"),
        (b'{"model": 5, "messages": []}', 400, "invalid_request", "model"),
        (b'{"model": "sim"}', 400, "invalid_request", "messages"),
        (chat(model="nope"), 404, "model_not_found", "model"),
        (b'{"model": "\\ud800", "messages": []}', 404, "model_not_found", "model"),
        (chat(pad="x" * 5000), 413, "body_too_large", None),
    ],
)
async def test_bad_requests_get_openai_shaped_errors_and_reach_no_replica(
    body: bytes, status: int, code: str, param: str | None
) -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, max_body_bytes=4096) as running:
            if len(body) > 50_000:
                running.gateway.settings.max_body_bytes = 1 << 20
            answer = await running.post(body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
            assert error["message"] and "x-kvroute-request-id" in answer.headers
            assert replica.seen == [] and running.idle()


async def test_unknown_model_lists_what_there_is() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat(model="nope"))
        assert "'nope'" in answer.json()["error"]["message"]
        assert "'sim'" in answer.json()["error"]["message"]


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, body_timeout_s=0.1) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"body_timeout"' in answer
            writer.close()


async def test_a_silent_replica_times_out_with_504() -> None:
    async def silent(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(1)

    async with scripted(silent) as (replica,):
        async with running_gateway(replica, first_byte_timeout_s=0.1) as running:
            answer = await running.post(chat())
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "replica_timeout")
            await running.becomes_idle()


async def test_more_than_max_inflight_is_refused_and_nothing_leaks() -> None:
    release = asyncio.Event()

    async def wait(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(json_answer({}))

    async with scripted(wait) as (replica,), running_gateway(replica, max_inflight=2) as running:
        held = [asyncio.create_task(running.post(chat())) for _ in range(2)]
        async with asyncio.timeout(5):
            while len(replica.seen) < 2:
                await asyncio.sleep(0.005)
        refused = await running.post(chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_overloaded")
        assert refused.headers["retry-after"] == "1"
        release.set()
        assert [each.status_code for each in await asyncio.gather(*held)] == [200, 200]
        await running.becomes_idle()


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def old(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    async with scripted(old) as (replica,), running_gateway(replica) as running:
        assert (await running.post(chat())).text == "all of it"


async def test_what_is_not_http_is_an_error_of_ours() -> None:
    async def junk(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-whatever\r\n")

    async with scripted(junk) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"


async def test_connections_to_replicas_are_reused() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, probe_interval_s=30) as running:
            probing = replica.connections
            body = b'{"model": "sim", "prompt": [1, 2, 3]}'
            for _ in range(5):
                assert (await running.post(body, path="/v1/completions")).status_code == 200
            assert replica.connections - probing == 1


async def test_no_replica_at_all_is_503_not_404() -> None:
    async with running_gateway(f"http://127.0.0.1:{closed_port()}") as running:
        answer = await running.post(chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        ready = await running.client.get("/readyz")
        assert ready.status_code == 503
        (state,) = ready.json()["replicas"].values()
        assert not state["healthy"] and state["reason"]


async def test_reused_tokens_are_compared_with_the_prediction() -> None:
    async def usage(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = {"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}
        writer.write(json_answer(answer))

    index = TaughtIndex()
    async with scripted(usage) as (replica,):
        index.holds = lambda root, hashes: {Holder(replica.name, 0, "device"): 2}
        async with running_gateway(replica, index=index) as running:
            body = json.dumps({"model": "sim", "prompt": list(range(100))}).encode()
            answer = await running.post(body, path="/v1/completions")
            assert answer.headers["x-kvroute-matched-tokens"] == "32"
            metrics = (await running.client.get("/metrics")).text
            assert "kvroute_cached_tokens_total 48.0" in metrics
            assert "kvroute_matched_tokens_total 32.0" in metrics
            assert 'kvroute_misprediction_tokens_total{direction="under"} 16.0' in metrics
