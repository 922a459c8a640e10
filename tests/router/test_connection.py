"""The client's side of a connection: limits, deadlines, ambiguous framing, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvloop

from router.connection import ClientConnection
from tests.router.raw import PATH, Wire, chunked, head, post
from tests.router.support import (
    SSE_HEAD,
    Running,
    Seen,
    Streams,
    answer_ok,
    chat,
    chunk,
    running_gateway,
    scripted,
)

TE = b"transfer-encoding: chunked"
SMUGGLED = post(chat(), b"x-smuggled: yes")
AMBIGUOUS = {
    "length and chunked": head(b"content-length: 5", TE) + b"0\r\n\r\n",
    "chunked and length": head(TE, b"content-length: 5") + b"0\r\n\r\n",
    "two lengths": head(b"content-length: 5", b"content-length: 6") + b"hello",
    "the same length twice": head(b"content-length: 5", b"content-length: 5") + b"hello",
    "a list of lengths": head(b"content-length: 5, 5") + b"hello",
    "a signed length": head(b"content-length: +5") + b"hello",
    "a hexadecimal length": head(b"content-length: 0x5") + b"hello",
    "an empty length": head(b"content-length:") + b"hello",
    "a length beyond 64 bits": head(b"content-length: 99999999999999999999") + b"hello",
    "a folded header": head(b"x-a: b\r\n c", b"content-length: 0"),
    "a folded coding": head(b"transfer-encoding:\r\n chunked") + b"0\r\n\r\n",
    "bare LF": head(b"content-length: 0").replace(b"\r\n", b"\n"),
    "bare LF after a header": head(b"x-a: b\ncontent-length: 0"),
    "bare CR in a header": head(b"x-a: b\rcontent-length: 0"),
    "NUL in a header": head(b"x-a: b\0c"),
    "space before the colon": head(b"transfer-encoding : chunked") + b"0\r\n\r\n",
    "space in a name": head(b"x a: b"),
    "no colon": head(b"x-a"),
    "space before the first header": b"POST / HTTP/1.1\r\n host: x\r\n\r\n",
    "gzip and chunked": head(b"transfer-encoding: gzip, chunked") + b"0\r\n\r\n",
    "chunked and gzip": head(b"transfer-encoding: chunked, gzip") + b"0\r\n\r\n",
    "gzip, then chunked": head(b"transfer-encoding: gzip", TE) + b"0\r\n\r\n",
    "chunked twice": head(TE, TE) + b"0\r\n\r\n",
    "gzip alone": head(b"transfer-encoding: gzip") + b"0\r\n\r\n",
    "identity": head(b"transfer-encoding: identity") + b"0\r\n\r\n",
    "a coding nobody knows": head(b"transfer-encoding: xchunked") + b"0\r\n\r\n",
    "a quoted coding": head(b'transfer-encoding: "chunked"') + b"0\r\n\r\n",
    "a vertical tab": head(b"transfer-encoding: \x0bchunked") + b"0\r\n\r\n",
    "chunked in HTTP/1.0": head(TE).replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "a chunk size with 0x": head(TE) + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a signed chunk size": head(TE) + b"+5\r\nhello\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": head(TE) + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a space": head(TE) + b"5 \r\nhello\r\n0\r\n\r\n",
    "a chunk size with bare LF": head(TE) + b"5\nhello\r\n0\r\n\r\n",
    "no chunk size": head(TE) + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than its size": head(TE) + b"4\r\nhello\r\n0\r\n\r\n",
    "a length in the trailers": head(TE) + b"0\r\ncontent-length: 5\r\n\r\n",
    "no host": b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
    "two hosts": head(b"host: y", b"content-length: 0"),
    "an unknown version": head().replace(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "CONNECT": head(method=b"CONNECT", target=b"x:1"),
    "a target that is no path": head(target=b"x"),
}


async def refusals(running: Running) -> dict[str, float]:
    text = (await running.client.get("/metrics")).text
    name = "kvroute_client_refused_total"
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def connections(running: Running, count: int) -> None:
    async with asyncio.timeout(5):
        while running.gateway.clients.count != count:
            await asyncio.sleep(0.005)


async def test_what_two_readers_could_read_differently_is_refused() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for what, request in AMBIGUOUS.items():
            async with await Wire.to(running.port) as wire:
                wire.send(request + SMUGGLED)
                answer = await wire.answer()
                assert (answer.status, answer.code) == (400, "bad_http"), what
                assert answer.closes, what
                assert len(answer.headers["x-kvroute-request-id"]) == 32, what
                wire.writer.write_eof()
                assert await wire.ended() == b"", what
        assert replica.seen == []
        assert await refusals(running) == {"bad_http": len(AMBIGUOUS)}
        assert running.idle()


async def test_a_body_that_turns_bad_is_refused_whatever_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = b"0x5\r\nhello\r\n0\r\n\r\n"
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for path in (PATH, b"/nowhere"):
            async with await Wire.to(running.port) as wire:
                wire.send(head(TE, b"expect: 100-continue", target=path) + bad)
                assert (await wire.answer()).code == "bad_http"
            async with await Wire.to(running.port) as wire:
                wire.send(head(TE, b"expect: 100-continue"))
                assert (await wire.answer()).status == 100
                wire.send(bad)
                assert (await wire.answer()).code == "bad_http"
        await running.becomes_idle()
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_heads_are_bounded() -> None:
    limits: dict[str, Any] = {"max_head_bytes": 2048, "max_target_bytes": 512, "max_headers": 8}
    long = b"x" * 2048
    cases = {
        "one header": (head(b"x-a: " + long), 431, "head_too_large"),
        "a header without end": (head()[:-2] + b"x-a: " + 3 * long, 431, "head_too_large"),
        "a name without end": (head()[:-2] + 3 * long, 431, "head_too_large"),
        "many headers": (head(*[b"x: y"] * 8), 431, "head_too_large"),
        "a target": (head(target=b"/" + long), 414, "target_too_long"),
        "a target without end": (b"GET /" + 3 * long, 414, "target_too_long"),
        "trailers": (head(TE) + b"0\r\nx-a: " + long, 431, "head_too_large"),
        "trailer upon trailer": (head(TE) + b"0\r\n" + b"x: y\r\n" * 500, 431, "head_too_large"),
        "chunk extensions": (head(TE) + b"5;" + 3 * long, 431, "head_too_large"),
        "empty lines": (b"\r\n" * 2048, 431, "head_too_large"),
    }
    async with scripted(answer_ok) as (replica,), running_gateway(replica, **limits) as running:
        for what, (request, status, code) in cases.items():
            async with await Wire.to(running.port) as wire:
                begun = request.partition(b"chunked\r\n\r\n")
                if begun[1]:  # within the body, so in a read of its own
                    wire.send(begun[0] + begun[1])
                    while running.idle():
                        await asyncio.sleep(0.001)
                    request = begun[2]
                wire.send(request)
                answer = await wire.answer()
                assert (answer.status, answer.code) == (status, code), what
                assert answer.closes, what
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat(), b"x-a: " + long[:1500]))
            assert (await wire.answer()).status == 200
        assert len(replica.seen) == 1


async def test_a_head_that_does_not_arrive_is_given_up() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, head_timeout_s=0.1) as running:
            started_s = asyncio.get_running_loop().time()
            for part in (b"POST / HTTP/1.1\r\nhost: x\r\n", b"P", b"\r\n\r\n"):
                async with await Wire.to(running.port) as wire:
                    wire.send(post(chat()))
                    assert (await wire.answer()).status == 200
                    wire.send(part)
                    answer = await wire.answer()
                    assert (answer.status, answer.code) == (408, "head_timeout")
                    assert answer.closes
            assert asyncio.get_running_loop().time() - started_s < 2


async def test_idle_connections_are_closed_without_a_word() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, client_idle_timeout_s=0.1) as running:
            async with await Wire.to(running.port) as fresh, await Wire.to(running.port) as used:
                used.send(post(chat()))
                assert (await used.answer()).status == 200
                assert await fresh.ended() == b""
                assert await used.ended() == b""


async def test_connections_beyond_the_limit_are_told_so_and_closed() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, max_connections=2) as running:
            first, second = await Wire.to(running.port), await Wire.to(running.port)
            async with first, second, await Wire.to(running.port) as third:
                first.send(post(chat()))
                assert (await first.answer()).status == 200
                third.send(post(chat()))
                answer = await third.answer()
                assert (answer.status, answer.code) == (503, "too_many_connections")
                assert answer.headers["retry-after"] == "1"
                assert answer.closes
                third.writer.write_eof()
                assert await third.ended() == b""
                await connections(running, 2)
                first.send(head(method=b"GET", target=b"/metrics"))
                text = (await first.answer()).body
                assert b"\nkvroute_client_connections 2.0\n" in text
                assert b'kvroute_client_refused_total{reason="too_many_connections"} 1.0' in text
            await connections(running, 0)
            assert (await running.post(chat())).status_code == 200


@pytest.mark.parametrize("content_bytes", [2, 300_000])
async def test_a_clients_fin_during_the_answer_counts_as_leaving(content_bytes: int) -> None:
    streams = Streams()
    async with scripted(streams) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat(stream=True, padding="x" * content_bytes)))
            async with asyncio.timeout(5):
                await wire.reader.readuntil(b"data: 1\n\n")
            wire.writer.write_eof()
            async with asyncio.timeout(0.1):
                await streams.left.wait()
            await running.becomes_idle()


async def test_a_half_closed_client_gets_its_answer_where_that_is_wanted() -> None:
    streams = Streams()
    async with scripted(streams) as (replica,):
        async with running_gateway(replica, tolerate_half_close=True) as running:
            async with await Wire.to(running.port) as wire:
                wire.send(post(chat(stream=True)))
                async with asyncio.timeout(5):
                    await wire.reader.readuntil(b"data: 1\n\n")
                wire.writer.write_eof()
                streams.go_on.set()
                assert (await wire.ended()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            async with await Wire.to(running.port) as wire:
                wire.send(post(chat(stream=True)) + post(chat(stream=True))[:-1])
                wire.writer.write_eof()
                assert (await wire.ended()).count(b"data: [DONE]") == 1
            assert len(replica.seen) == 2


@pytest.mark.parametrize("tolerate", [False, True])
async def test_a_request_cut_short_reaches_no_replica(tolerate: bool) -> None:
    whole = [post(chat()), chunked(chat())]
    parts = [each[:end] for each in whole for end in (9, 60, len(each) - 1)]
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, tolerate_half_close=tolerate) as running:
            for part in parts:
                async with await Wire.to(running.port) as wire:
                    wire.send(part)
                    wire.writer.write_eof()
                    async with asyncio.timeout(5):
                        while not wire.reader.at_eof():
                            try:
                                assert await wire.reader.read() == b""
                            except ConnectionResetError:
                                break
            await running.becomes_idle()
            assert replica.seen == []


async def test_the_body_is_asked_for_only_when_it_is_wanted() -> None:
    expect = b"expect: 100-continue"
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, max_body_bytes=2048) as running:
            async with await Wire.to(running.port) as wire:
                body = chat()
                for _ in range(2):
                    wire.send(head(b"content-length: %d" % len(body), expect))
                    assert (await wire.answer()).status == 100
                    wire.send(body)
                    assert (await wire.answer()).status == 200
            refused = {
                413: head(b"content-length: 4096", expect),
                404: head(b"content-length: 9", expect, target=b"/nowhere"),
                415: head(b"content-length: 9", b"content-encoding: lzma", expect),
            }
            for status, request in refused.items():
                async with await Wire.to(running.port) as wire:
                    wire.send(request)
                    answer = await wire.answer()
                    assert answer.status == status
                    assert answer.closes
            async with await Wire.to(running.port) as wire:
                wire.send(post(body, expect).replace(b"HTTP/1.1", b"HTTP/1.0"))
                assert (await wire.answer()).status == 200


async def test_http_1_0_clients_get_no_chunks_and_the_end_of_the_connection() -> None:
    streams = Streams()
    streams.go_on.set()
    async with scripted(streams) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = await wire.answer()
            assert (answer.status, answer.body) == (200, b"data: 1\n\ndata: [DONE]\n\n")
            assert "transfer-encoding" not in answer.headers and answer.closes
        async with await Wire.to(running.port) as wire:
            wire.send(b"GET /livez HTTP/1.0\r\n\r\n")
            assert (await wire.answer()).closes
            assert await wire.ended() == b""


async def test_an_answer_cut_for_an_http_1_0_client_is_reset() -> None:
    async def cut(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.abort()

    async with scripted(cut) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat()).replace(b"HTTP/1.1", b"HTTP/1.0"))
            with pytest.raises(ConnectionResetError):
                await wire.ended()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def echo(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = (seen.header("x-number") or "").encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(number), number))

    async with scripted(echo) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(b"".join(post(chat(), b"x-number: %d" % n) for n in range(30)))
            assert [(await wire.answer()).body for _ in range(30)] == [b"%d" % n for n in range(30)]
            # What follows is refused only after those before it have their answers.
            good = b"".join(post(chat(), b"x-number: %d" % n) for n in range(2))
            wire.send(good + head(TE) + b"5\r\nhell" + b"\r\n0\r\n\r\n" + SMUGGLED)
            assert [(await wire.answer()).body for _ in range(2)] == [b"0", b"1"]
            assert (await wire.answer()).code == "bad_http"
        assert [seen for seen in replica.seen if seen.header("x-smuggled")] == []
        assert len(replica.seen) == 32


async def test_nothing_after_a_last_request_is_served() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat(), b"connection: close") + SMUGGLED)
            answer = await wire.answer()
            assert answer.status == 200 and answer.closes
            assert await wire.ended() == b""
        await running.becomes_idle()
        assert len(replica.seen) == 1


async def test_other_forms_of_a_request_are_understood() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat(), target=b"http://elsewhere:1" + PATH + b"?a=b"))
            assert (await wire.answer()).status == 200
            assert replica.seen[-1].target == PATH.decode() + "?a=b"
            assert replica.seen[-1].header("host") == replica.name
            wire.send(b"\r\n" + head(method=b"OPTIONS", target=b"*"))
            assert (await wire.answer()).status == 404
            wire.send(head(method=b"HEAD", target=b"/nowhere"))
            assert (await wire.answer(head_only=True)).status == 404
            # An offer to switch protocols is not taken up, and what follows is not lost.
            offer = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AA")
            body = chat(n="x" * 99)
            for offered in (post(body, *offer), chunked(body, *offer, trailers=b"x-t: v\r\n")):
                wire.send(offered + head(*offer, method=b"GET", target=b"/livez"))
                assert (await wire.answer()).status == 200
                assert (await wire.answer()).body == b'{"status":"alive"}'
                assert replica.seen[-1].body == body


async def test_an_early_refusal_can_be_read_while_the_body_still_comes() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, max_body_bytes=1024) as running:
            for start in (head(b"content-length: 8000000"), head(TE) + b"7a1200\r\n"):
                async with await Wire.to(running.port) as wire:
                    wire.send(start)
                    for _ in range(125):
                        wire.send(b"x" * 64_000)
                        await wire.writer.drain()
                    answer = await wire.answer()
                    assert (answer.status, answer.code) == (413, "body_too_large")
                    assert answer.closes
            assert replica.seen == []


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_small_writes_are_not_held_back(loop: Any) -> None:
    delays: list[int] = []

    class Observed(ClientConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            connected = transport.get_extra_info("socket")
            delays.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def once() -> None:
        async with scripted(answer_ok) as (replica,):
            async with running_gateway(replica, http=Observed) as running:
                assert (await running.post(chat())).status_code == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(once())
    assert delays == [1]


async def test_a_client_that_does_not_read_does_not_outlive_its_deadline() -> None:
    left = asyncio.Event()

    async def endless(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SSE_HEAD)
        try:
            while True:
                writer.write(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))
                await writer.drain()
        finally:
            left.set()

    async with scripted(endless) as (replica,):
        async with running_gateway(replica, request_timeout_s=0.3) as running:
            async with await Wire.to(running.port) as wire:
                wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
                wire.send(post(chat(stream=True)))
                async with asyncio.timeout(3):
                    await left.wait()
                    await running.becomes_idle()
