"""A client that reads HTTP/1.1 by hand and keeps what others hide: how an answer ended."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 30.0
"""What takes longer hangs."""


@dataclass
class Answer:
    """One answer as far as it came. `whole`: it ended as its framing says it must."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    seconds: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica(self) -> str | None:
        return self.headers.get("x-kvroute-replica")

    @property
    def events(self) -> list[bytes]:
        return [each for each in self.body.split(b"\n\n") if each]

    @property
    def complete(self) -> bool:
        """A whole stream that says so itself, or a whole 200 that is none."""
        if self.status != 200 or not self.whole:
            return False
        return not self.streaming or self.events[-1:] == [b"data: [DONE]"]

    @property
    def streaming(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def cut(self) -> bool:
        """It had begun, and ended as a cut stream must: error event, no [DONE], no last chunk."""
        *before, last = self.events or [b""]
        if not before or not last.startswith(b"event: error\ndata: "):
            return False
        error = json.loads(last.partition(b"data: ")[2])["error"]
        return not self.whole and b"[DONE]" not in self.body and bool(error["message"])

    def __str__(self) -> str:
        tail = self.body[-120:]
        return f"{self.status} from {self.replica}, whole={self.whole}, ...{tail!r}"


def chat_body(text: str = "hi", *, model: str = "sim-model", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": model, "messages": messages, **fields}).encode()


def head(body: bytes, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    kind = "content-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nhost: gateway\r\n{kind}{length}{extra}\r\n".encode()


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


async def ask(
    url: str,
    body: bytes,
    answer: Answer | None = None,
    extra: str = "",
    path: str = "/v1/chat/completions",
) -> Answer:
    """The answer to one request on a connection of its own. Raises TimeoutError if it hangs."""
    answer = answer or Answer()
    started_s = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*address(url))
        try:
            writer.write(head(body, path, extra) + body)
            await read_answer(reader, answer)
        finally:
            answer.seconds = time.perf_counter() - started_s
            writer.transport.abort()
    return answer


async def read_answer(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Fill in `answer` until it or its connection ends."""
    try:
        await _read_head(reader, answer)
        if answer.headers.get("transfer-encoding") == "chunked":
            await _read_chunks(reader, answer)
        else:
            length = int(answer.headers["content-length"])
            while len(answer.body) < length:
                await _add(answer, await reader.read(length - len(answer.body)))
        answer.whole = True
    except (asyncio.IncompleteReadError, ConnectionError):
        pass


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text.rstrip("\r\n").split("\r\n")
    answer.status = int(first.split(" ")[1])
    for line in lines:
        name, _, value = line.partition(":")
        answer.headers[name.lower()] = value.strip()


async def _read_chunks(reader: asyncio.StreamReader, answer: Answer) -> None:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await _add(answer, await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)


async def _add(answer: Answer, piece: bytes) -> None:
    if not piece:
        raise asyncio.IncompleteReadError(b"", None)
    answer.body += piece
    answer.begun.set()


async def get_text(url: str, path: str) -> str:
    """The body of a GET; other statuses than 200 are fine."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*address(url))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            answer = Answer()
            await read_answer(reader, answer)
        finally:
            writer.transport.abort()
    assert answer.whole, f"GET {path}: {answer}"
    return answer.body.decode()
