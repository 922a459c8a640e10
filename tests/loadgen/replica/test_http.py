import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from loadgen.replica.http import Exchange, HTTPServer
from loadgen.replica.server import Fleet
from tests.loadgen.replica.conftest import StartFleet, until

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


class Wire:
    """A client that sees the bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(5):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), fields

    async def answer(self) -> tuple[int, bytes]:
        status, fields = await self.head()
        async with asyncio.timeout(5):
            if "content-length" in fields:
                return status, await self.reader.readexactly(int(fields["content-length"]))
            if fields.get("transfer-encoding") == "chunked":
                return status, await self._chunks()
            return status, await self.reader.read()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def ended(self) -> bool:
        async with asyncio.timeout(5):
            return await self.reader.read() == b""


async def connect(url: str) -> Wire:
    parts = urlsplit(url)
    return Wire(*await asyncio.open_connection(parts.hostname, parts.port))


@pytest.fixture
async def wire(fleet: Fleet) -> AsyncIterator[Wire]:
    wire = await connect(fleet.replicas[0].url)
    yield wire
    wire.writer.close()
    await wire.writer.wait_closed()


def post(body: bytes = BODY, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_connection_serves_many_requests(wire: Wire) -> None:
    for _ in range(3):
        wire.writer.write(post())
        status, body = await wire.answer()
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] == 2


async def test_pipelined_requests_are_answered_in_order(wire: Wire) -> None:
    limits = [5, 1, 3]
    for limit in limits:
        wire.writer.write(post(BODY.replace(b'"max_tokens": 2', b'"max_tokens": %d' % limit)))
    got = [json.loads((await wire.answer())[1])["usage"]["completion_tokens"] for _ in limits]
    assert got == limits


async def test_more_pipelined_requests_than_are_kept(wire: Wire) -> None:
    padded = BODY[:-1] + b', "padding": "%b"}' % (b"x" * 20_000)
    wire.writer.write(post(padded) * 100)
    for _ in range(100):
        assert (await wire.answer())[0] == 200


async def test_chunked_bodies_and_split_packets(wire: Wire) -> None:
    wire.writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for byte in BODY:
        wire.writer.write(b"1\r\n%c\r\n" % byte)
        await wire.writer.drain()
    wire.writer.write(b"0\r\n\r\n")
    assert (await wire.answer())[0] == 200


async def test_expect_continue_is_answered_before_the_body(wire: Wire) -> None:
    wire.writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
    assert (await wire.head())[0] == 100
    wire.writer.write(BODY)
    assert (await wire.answer())[0] == 200


async def test_connection_close_is_obeyed(wire: Wire) -> None:
    wire.writer.write(post(extra=b"connection: close\r\n"))
    assert (await wire.answer())[0] == 200
    assert await wire.ended()


async def test_old_clients_get_an_unframed_stream(wire: Wire) -> None:
    body = BODY[:-1] + b', "stream": true}'
    wire.writer.write(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    status, answer = await wire.answer()
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_nonsense_is_refused_and_ends_the_connection(wire: Wire) -> None:
    wire.writer.write(b"NONSENSE\r\n\r\n")
    assert (await wire.answer())[0] == 400
    assert await wire.ended()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(start_fleet: StartFleet, stream: bool) -> None:
    fleet = await start_fleet(decode_step_s=0.02)
    replica = fleet.replicas[0]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000, "stream": stream}
    wire, watcher = await connect(replica.url), await connect(replica.url)
    wire.writer.write(post(json.dumps(body).encode()))
    if stream:
        assert (await wire.head())[0] == 200
        await wire.reader.readuntil(b"content")
    else:
        await wire.writer.drain()
        await until(lambda: replica.ranks[0].running == 1)
    assert await _load(watcher) == 1
    wire.writer.close()
    await wire.writer.wait_closed()
    await until(lambda: replica.ranks[0].running == 0)
    assert await _load(watcher) == 0
    assert replica.ranks[0].kv_usage == 0
    watcher.writer.close()
    await watcher.writer.wait_closed()


async def _load(wire: Wire) -> int:
    wire.writer.write(b"GET /load HTTP/1.1\r\nhost: a\r\n\r\n")
    return json.loads((await wire.answer())[1])["server_load"]


async def test_closing_the_server_ends_open_answers() -> None:
    abandoned = asyncio.Event()

    def never_answer(exchange: Exchange) -> None:
        exchange.on_abandoned = abandoned.set

    server = HTTPServer(never_answer)
    await server.start("127.0.0.1", 0)
    wire = await connect(f"http://127.0.0.1:{server.port}")
    wire.writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await wire.writer.drain()
    # The server has the request once it reads from the same loop.
    await asyncio.sleep(0.01)
    await server.close()
    async with asyncio.timeout(5):
        await abandoned.wait()
    wire.writer.close()
