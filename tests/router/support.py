"""A replica that plays a script at the socket, an index that is told what it knows, a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from cache_index.blocks import unpack_hashes
from cache_index.flights import Flights
from cache_index.types import Holder, ListenerStatus, SourceSpec, SourceStatus
from router.app import Gateway, create_app
from router.config import Settings
from router.connection import ClientConnection

MODEL = "sim"


@dataclass
class Seen:
    """One request as its bytes arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


Script = Callable[["Seen", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def json_answer(content: Any, status: str = "200 OK", extra: str = "") -> bytes:
    body = json.dumps(content).encode()
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{extra}\r\n"
    ).encode() + body


class Streams:
    """A script: answers begin at once and end when they are let, unless the gateway leaves."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if b'"stream": true' not in seen.body:
            return await answer_ok(seen, reader, writer)
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        leaving = asyncio.ensure_future(reader.read(1))
        allowed = asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait((leaving, allowed), return_when=asyncio.FIRST_COMPLETED)
        for each in (leaving, allowed):
            each.cancel()
        if not self.go_on.is_set():
            self.left.set()
            raise ConnectionError
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def answer_ok(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(json_answer({"ok": True}))


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedReplica:
    """Speaks HTTP/1.1 by hand. Control paths are answered; every POST is recorded and scripted."""

    def __init__(self, script: Script = answer_ok, models: Sequence[str] = (MODEL,)) -> None:
        self.script = script
        self.models = list(models)
        self.health = "200 OK"
        self.seen: list[Seen] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.unrecorded = {"/tokenize"}
        self.gets: dict[str, bytes] = {}
        self.event_sources: dict[str, Any] | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listener and cut every connection, as a killed process does."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (seen := await self._read(reader)) is not None:
                if seen.method == "GET" or seen.target in self.unrecorded:
                    writer.write(self._control(seen))
                else:
                    self.seen.append(seen)
                    await self.script(seen, reader, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.closed.set()
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
        if dict(headers).get("transfer-encoding") == "chunked":
            return Seen(method, target, headers, await self._chunks(reader))
        length = int(dict(headers).get("content-length", "0"))
        return Seen(method, target, headers, await reader.readexactly(length))

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return body

    def _control(self, seen: Seen) -> bytes:
        if seen.target in self.gets:
            return self.gets[seen.target]
        if seen.target == "/health":
            return json_answer({}, self.health)
        if seen.target == "/v1/models":
            return json_answer({"data": [{"id": name, "object": "model"} for name in self.models]})
        if seen.target == "/kv_event_sources" and self.event_sources is not None:
            return json_answer(self.event_sources)
        return json_answer({"detail": "Not Found"}, "404 Not Found")


@dataclass
class TaughtIndex:
    """An index that holds what a test says."""

    holds: Callable[[int, list[int]], Mapping[Holder, int]] = lambda root, hashes: {}
    specs: list[SourceSpec] = field(default_factory=list)
    available: bool = True
    redis_url: str | None = None
    flights: Flights = field(default_factory=Flights)
    asked: list[tuple[int, int]] = field(default_factory=list)
    statuses: list[SourceStatus] = field(default_factory=list)
    voided: list[tuple[str, str]] = field(default_factory=list)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def set_sources(self, specs: Collection[SourceSpec]) -> None:
        self.specs = list(specs)

    def sources(self) -> list[SourceStatus]:
        return self.statuses

    def listeners(self) -> list[ListenerStatus]:
        return []

    def void(self, replica: str, reason: str) -> None:
        self.voided.append((replica, reason))

    def trusts(self) -> Mapping[tuple[str, int], str]:
        return {(each.replica, each.rank): str(each.trust) for each in self.statuses}

    def match(self, root: int, hashes: bytes) -> Mapping[Holder, int]:
        unpacked = unpack_hashes(hashes)
        self.asked.append((root, len(unpacked)))
        return self.holds(root, unpacked)


class _QuietServer(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@dataclass
class Running:
    """A gateway listening on a free port of this process."""

    gateway: Gateway
    client: httpx.AsyncClient
    port: int
    index: TaughtIndex

    async def post(self, body: bytes, path: str = "/v1/chat/completions", **kw: Any) -> Any:
        headers = {"content-type": "application/json", **kw.pop("headers", {})}
        return await self.client.post(path, content=body, headers=headers, **kw)

    def idle(self) -> bool:
        """No load is held and no request is in flight."""
        loads = self.gateway.load.ranks().values()
        return self.gateway.relay.inflight == 0 and all(
            load.running == 0 and load.queued_tokens == 0 for load in loads
        )

    async def becomes_idle(self, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.idle():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_gateway(
    *replicas: ScriptedReplica | str,
    index: TaughtIndex | None = None,
    http: Any = ClientConnection,
    **settings: Any,
) -> AsyncIterator[Running]:
    index = index or TaughtIndex()
    urls = [{"url": each if isinstance(each, str) else each.url} for each in replicas]
    # What a test counts must not depend on the doctor's own questions.
    given = {
        "doctor": "off",
        "probe_interval_s": 0.05,
        "replicas": urls,
        "policy": "round_robin",
        **settings,
    }
    app = create_app(Settings(**given), index)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app, http=http, lifespan="on", log_config=None, timeout_graceful_shutdown=1
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(5):
            while not server.started:
                await asyncio.sleep(0.005)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield Running(app.gateway, client, port, index)
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[list[ScriptedReplica]]:
    replicas = [ScriptedReplica(script) for script in scripts]
    for replica in replicas:
        await replica.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            await replica.stop()


def chat(**fields: Any) -> bytes:
    content = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(content).encode()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
