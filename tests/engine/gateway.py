"""A running `kvroute serve` and what the tests ask of it and of the replica behind it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.engine.replica import BLOCK_TOKENS, MODEL

START_DEADLINE_S = 30.0
READY_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 120.0
# How long after its answer a prompt may take to be known. The index promises 100 ms; the machine
# that runs this test promises nothing.
INDEX_DEADLINE_S = 5.0
CHAT = "/v1/chat/completions"
ADMIN_TOKEN = "for the tests"


class GatewayError(Exception):
    """The gateway did not start or did not get ready; the message holds the end of its log."""


class Gateway:
    """`kvroute serve` on a free port; a context manager that ends it."""

    def __init__(self, folder: Path, replicas: list[str], tokenizer: Path | None = None) -> None:
        self._log = folder / "gateway.log"
        self.replicas = replicas
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Gateway:
        command = [str(Path(sys.executable).with_name("kvroute")), "serve", "--port", "0"]
        command += [part for url in self.replicas for part in ("--replica", url)]
        command += ["--tokenizer", str(self._tokenizer)] if self._tokenizer else []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--exit-on-stdin-eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # An engine that shares one core with everything else answers /tokenize late.
                env={
                    **os.environ,
                    "KVROUTE_RENDER_TIMEOUT_S": "10",
                    "KVROUTE_ADMIN_TOKEN": ADMIN_TOKEN,
                },
            )
        try:
            self.url = self._listening()
            self.wait_exact()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        status = self._end()
        assert status == 0, f"the gateway ended with {status}:\n{self.log_tail()}"

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[None]:
        """The same for a test whose event loop must go on while the gateway starts and ends."""
        await asyncio.to_thread(self.__enter__)
        try:
            yield
        finally:
            await asyncio.to_thread(self.__exit__, None, None, None)

    def ask_admin(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a route under /admin answers; a POST where there is a body."""
        answer = httpx.request(
            "GET" if body is None else "POST",
            f"{self.url}/admin/{path}",
            json=body,
            headers={"authorization": f"Bearer {ADMIN_TOKEN}"},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def wait_exact(self) -> None:
        """Wait until every replica is healthy and its events are followed without a gap."""

        def exact() -> bool:
            try:
                answer = httpx.get(f"{self.url}/readyz", timeout=5).json()
            except httpx.TransportError:
                return False
            states = answer["replicas"].values()
            return all(s["healthy"] and s["trust"] == "exact" for s in states)

        if not eventually(exact, READY_DEADLINE_S):
            seen = httpx.get(f"{self.url}/readyz", timeout=5).text
            raise GatewayError(f"not ready: {seen}\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def _listening(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_DEADLINE_S)
        line = self._process.stdout.readline().decode() if readable else ""
        if "listening on " not in line:
            raise GatewayError(f"it printed {line!r}; its log:\n{self.log_tail()}")
        return line.rpartition(" ")[2].strip()

    def _end(self) -> int:
        assert self._process is not None
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode


def eventually(holds: Callable[[], bool], deadline_s: float) -> bool:
    """Poll; other processes give nothing to await."""
    until_s = time.monotonic() + deadline_s
    while not (held := holds()) and time.monotonic() < until_s:
        time.sleep(0.05)
    return held


@dataclass(frozen=True)
class Answer:
    """What gateway and engine said of one request's reuse, in tokens."""

    matched: int
    cached: int
    prompt: int
    text: str

    @property
    def most(self) -> int:
        """The most that an engine reuses: full blocks, never the whole prompt."""
        return (self.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def ask(base_url: str, body: dict[str, Any], path: str = CHAT) -> Answer:
    """Send one request that must succeed."""
    answer = httpx.post(f"{base_url}{path}", json=body, timeout=ANSWER_DEADLINE_S)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    choice = said["choices"][0]
    return Answer(
        matched=int(answer.headers.get("x-kvroute-matched-tokens", 0)),
        cached=said["usage"]["prompt_tokens_details"]["cached_tokens"],
        prompt=said["usage"]["prompt_tokens"],
        text=choice["text"] if "text" in choice else choice["message"]["content"],
    )


def until_known(attempt: Callable[[], Answer]) -> Answer:
    """Repeat until the gateway knows of the prefix; the first answer that says so.

    Events take their time, and a gateway that got no processor time for as long as its index may
    lag routes on load alone until the next moment.
    """
    until_s = time.monotonic() + INDEX_DEADLINE_S
    while not (answer := attempt()).matched:
        assert time.monotonic() < until_s, f"the gateway has not learned of {answer}"
        time.sleep(0.05)
    return answer


def ask_known(base_url: str, body: dict[str, Any], path: str = CHAT) -> Answer:
    """Repeat a request until its prefix is known."""
    return until_known(lambda: ask(base_url, body, path))


def chat(system: str, user: str = "Answer in one word.", **fields: Any) -> dict[str, Any]:
    """A greedy chat request whose system text comes first, so that it decides what is shared."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    defaults = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 4}
    return {**defaults, **fields}


SUBJECTS = ("The harbour master", "A young baker", "The night train", "Her oldest map", "One gull")
VERBS = ("follows", "repairs", "remembers", "paints", "weighs", "forgets", "measures")
OBJECTS = ("the copper bell", "seven wet ropes", "a letter from Turin", "the lower garden")


def prose(name: str, sentences: int) -> str:
    """Text that differs from any other `name`'s within its first tokens; about 12 a sentence."""
    parts = (SUBJECTS, VERBS, OBJECTS)
    lines = (
        f"{i}: {' '.join(part[i * (k + 3) % len(part)] for k, part in enumerate(parts))}."
        for i in range(sentences)
    )
    mark = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{mark}. This is {name}. " + " ".join(lines)


class Tap:
    """A TCP proxy that keeps what the gateway sends to a replica, byte for byte."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent: list[bytearray] = []
        self.url = ""

    async def __aenter__(self) -> Tap:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self.sent.append(kept)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(copy(reader, up_writer, kept))
                group.create_task(copy(up_reader, writer, None))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            up_writer.close()
            self._tasks.discard(task)


async def copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None
) -> None:
    while data := await reader.read(1 << 16):
        if kept is not None:
            kept += data
        writer.write(data)
        await writer.drain()
    writer.write_eof()
