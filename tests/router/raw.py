"""HTTP/1.1 by hand, for what no client library would send."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

PATH = b"/v1/chat/completions"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        content = json.loads(self.body)
        assert content["error"]["message"], content
        return str(content["error"]["code"])

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, head_only: bool = False) -> Answer:
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head[:-4].split("\r\n")
            pairs = ((name, value) for name, _, value in (line.partition(": ") for line in lines))
            headers = dict(pairs)
            status = int(first.split(" ")[1])
            body = b"" if head_only or status == 100 else await self._body(headers)
        return Answer(status, headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return body

    async def ended(self) -> bytes:
        """What still comes until the other side closes."""
        async with asyncio.timeout(5):
            return await self.reader.read()


def head(*lines: bytes, method: bytes = b"POST", target: bytes = PATH) -> bytes:
    return b"\r\n".join((method + b" " + target + b" HTTP/1.1", b"host: x", *lines, b"", b""))


def post(body: bytes, *lines: bytes, target: bytes = PATH) -> bytes:
    return head(b"content-length: %d" % len(body), *lines, target=target) + body


def chunked(body: bytes, *lines: bytes, trailers: bytes = b"", sizes: int = 7) -> bytes:
    pieces = [body[at : at + sizes] for at in range(0, len(body), sizes)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head(b"transfer-encoding: chunked", *lines) + framed + b"0\r\n" + trailers + b"\r\n"
