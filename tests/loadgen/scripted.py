"""An HTTP server that answers each request with a script of byte pieces, cut as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import orjson

Script = list["bytes | asyncio.Event"]


@dataclass
class ScriptedServer:
    """`script(path, body)` gives the pieces to write; an Event is waited for before going on."""

    script: Callable[[str, dict], Script]
    requests: list[tuple[str, dict]] = field(default_factory=list)
    connections: int = 0
    url: str = ""
    handlers: set[asyncio.Task] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.handlers.add(asyncio.current_task())
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for handler in self.handlers:
            handler.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        path = head.split(" ")[1]
        self.requests.append((path, body))
        pieces = self.script(path, body)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        return bool(pieces) and pieces[-1] == b"0\r\n\r\n"


@asynccontextmanager
async def scripted_server(script: Callable[[str, dict], Script]) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(script)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        await scripted.close()
        await server.wait_closed()


def stream(events: bytes, cuts: list[int] | None = None, replica: str = "r1") -> Script:
    """A chunked 200 answer whose payload is cut at `cuts`, every cut a piece of its own."""
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        f"x-kvroute-replica: {replica}\r\nx-kvroute-matched-tokens: 16\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    )
    edges = [0, *(cuts or []), len(events)]
    pieces = [events[a:b] for a, b in pairwise(edges) if b > a]
    return [head.encode(), *(chunk(piece) for piece in pieces), b"0\r\n\r\n"]


def chunk(payload: bytes) -> bytes:
    return f"{len(payload):x}\r\n".encode() + payload + b"\r\n"


def status(code: int, body: bytes = b'{"error": {"message": "no"}}') -> Script:
    head = f"HTTP/1.1 {code} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return [head.encode() + body]


def chat_events(tokens: list[str], prompt_tokens: int = 20, cached_tokens: int = 16) -> bytes:
    """The stream of a chat answer as vLLM writes it: role, one chunk a token, finish, usage."""
    chunks: list[dict] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"delta": {"content": token}}]} for token in tokens]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    chunks.append({"choices": [], "usage": usage(prompt_tokens, cached_tokens, len(tokens))})
    return b"".join(event(orjson.dumps(one)) for one in chunks) + event(b"[DONE]")


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
