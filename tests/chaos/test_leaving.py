"""A client that leaves takes its upstream request with it, wherever that stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.client import chat_body, head
from tests.router.support import (
    MODEL,
    SSE_HEAD,
    Running,
    ScriptedReplica,
    Seen,
    chunk,
    running_gateway,
    scripted,
)

pytestmark = pytest.mark.slow

AIM_S = 0.1
BOUND_S = 0.5
"""What is asserted: a busy machine is not a fault."""
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
BOUNDARY = "b"
FORM = (
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{MODEL}\r\n'
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
).encode()


class Watched:
    """A script that tells when it was reached and when its connection was closed."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.begins = bool(pieces) and pieces != (SSE_HEAD,)
        self.reached = asyncio.Event()
        self.closed_at_s = 0.0
        self.closed = asyncio.Event()

    async def __call__(self, seen: Seen, reader: Reader, writer: Writer) -> None:
        for piece in self._pieces:
            writer.write(piece)
        self.reached.set()
        while await _read(reader):
            pass
        self.closed_at_s = time.perf_counter()
        self.closed.set()
        raise ConnectionError


async def _read(reader: Reader) -> bytes:
    try:
        return await reader.read(65536)
    except ConnectionError:
        return b""


async def left(running: Running, script: Watched, sent: bytes, *, politely: bool) -> float:
    """Seconds from the client's close to the replica's connection being closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    async with asyncio.timeout(5):
        await script.reached.wait()
        if script.begins:
            await reader.readuntil(b"\r\n\r\n")
        at_s = time.perf_counter()
        if politely:
            writer.close()
        else:
            writer.transport.abort()
        await script.closed.wait()
    await running.becomes_idle()
    return script.closed_at_s - at_s


def chat(*, stream: bool) -> bytes:
    body = chat_body(model=MODEL, stream=stream)
    return head(body) + body


def upload() -> bytes:
    """The first part of a form whose rest never comes."""
    kind = f"content-type: multipart/form-data; boundary={BOUNDARY}\r\ncontent-length: 99999\r\n"
    first = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\n{kind}\r\n".encode()
    return first + FORM + b"sound" * 100


WHERE: dict[str, tuple[Callable[[], Watched], bytes]] = {
    "before the head of a stream": (Watched, chat(stream=True)),
    "before the head of an answer": (Watched, chat(stream=False)),
    "after the head of a stream": (lambda: Watched(SSE_HEAD), chat(stream=True)),
    "within a stream": (
        lambda: Watched(SSE_HEAD, chunk(b"data: 1\n\n")),
        chat(stream=True),
    ),
    "within an answer": (
        lambda: Watched(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"),
        chat(stream=False),
    ),
}


@pytest.mark.parametrize("politely", [True, False], ids=["FIN", "RST"])
@pytest.mark.parametrize("where", WHERE)
async def test_leaving_closes_the_upstream_connection(where: str, politely: bool) -> None:
    make, sent = WHERE[where]
    script = make()
    async with scripted(script) as (replica,), running_gateway(replica) as running:
        report(where, await left(running, script, sent, politely=politely))


class BodyWatching(ScriptedReplica):
    """Scripts a form as soon as its head has arrived."""

    async def _read(self, reader: Reader) -> Seen | None:
        first = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = first.decode().split(" ", 2)
        return Seen(method, target, [], b"")


@pytest.mark.parametrize("politely", [True, False], ids=["FIN", "RST"])
async def test_leaving_during_an_upload_closes_the_upstream_connection(politely: bool) -> None:
    script = Watched()
    replica = BodyWatching(script)
    await replica.start()
    try:
        async with running_gateway(replica) as running:
            seconds = await left(running, script, upload(), politely=politely)
            report("during an upload", seconds)
    finally:
        await replica.stop()


@pytest.mark.parametrize("politely", [True, False], ids=["FIN", "RST"])
async def test_leaving_while_a_replica_tokenizes_ends_that_too(politely: bool) -> None:
    script = Watched()
    async with scripted(script) as (replica,):
        replica.unrecorded = set()  # /tokenize is scripted too
        async with running_gateway(replica, render_timeout_s=4.0) as running:
            seconds = await left(running, script, chat(stream=False), politely=politely)
            report("while a replica tokenizes", seconds)
            assert [each.target for each in replica.seen] == ["/tokenize"]


def report(where: str, seconds: float) -> None:
    print(f"{where}: closed after {seconds * 1e3:.1f} ms (aim {AIM_S * 1e3:.0f})")
    assert seconds < BOUND_S


async def test_a_client_that_leaves_before_its_request_is_whole_reaches_nobody() -> None:
    async def never(seen: Seen, reader: Reader, writer: Writer) -> None:
        raise AssertionError("reached")

    script: Callable[[Seen, Reader, Writer], Awaitable[None]] = never
    async with scripted(script) as (replica,), running_gateway(replica) as running:
        for length in (0, 10, 80, 150):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(chat(stream=True)[:length])
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        await running.becomes_idle()
        assert not replica.seen
