"""CPU per request of the gateway, beside nginx in the same run.

    python benchmarks/overhead.py [--requests 20000] [--concurrency 16] [--repeats 5] [--json PATH]

The gateway (exact prefix routing on, metrics on) and nginx, each alone and pinned to core 0;
instant replicas and the load client on core 1. CPU seconds are read from /proc for the measured
process tree, so they do not depend on how fast the client is. Bodies: a tiny chat request, and a
chat request with a long system prompt that repeats and a new question. What is not measured: the
engine, the network, streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from loadgen.tokenizer import default_folder

ANSWER_BODY = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "sim",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(ANSWER_BODY)
    + ANSWER_BODY
)


class InstantReplica(asyncio.Protocol):
    """Answers every request at once; reads framing by content-length alone."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""
        self.missing = 0

    def data_received(self, data: bytes) -> None:
        if self.missing > len(data):
            self.missing -= len(data)
            return
        if self.missing:
            self.transport.write(ANSWER)
            data, self.missing = data[self.missing :], 0
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, rest = self.buffer[: end + 2].lower(), self.buffer[end + 4 :]
            self.buffer = b""
            if head.startswith(b"get "):
                self.transport.write(self.control(head.split(b" ")[1]))
                self.buffer = rest
                continue
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(rest) < size:
                self.missing = size - len(rest)
                return
            self.transport.write(ANSWER)
            self.buffer = rest[size:]

    def control(self, path: bytes) -> bytes:
        content = {"data": [{"id": "sim"}]} if path == b"/v1/models" else {}
        body = json.dumps(content).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Client(asyncio.Protocol):
    """One closed-loop connection: the next request leaves when the answer is in."""

    def __init__(self, requests: Iterator[bytes], done: asyncio.Future[None]) -> None:
        self.requests = requests
        self.done = done
        self.buffer = b""
        self.answers = 0
        self.bad = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.transport.close()
            self.done.set_result(None)
        else:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        size = int(self.buffer[:end].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(self.buffer) < end + 4 + size:
            return
        self.bad += not self.buffer.startswith(b"HTTP/1.1 200")
        self.answers += 1
        self.buffer = self.buffer[end + 4 + size :]
        self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the gateway closed the connection"))


def request_bytes(body_bytes: int, number: int) -> bytes:
    """A chat request of about this size: a system prompt that repeats, a question that is new."""
    filler = " ".join(f"rule {i} holds for every answer;" for i in range(body_bytes // 30))
    messages = [
        {"role": "system", "content": filler},
        {"role": "user", "content": f"question {number}, please"},
    ]
    body = json.dumps({"model": "sim", "messages": messages, "max_tokens": 1}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    ) + body


def cpu_s(pid: int) -> float:
    """User and system seconds of a process and its children."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(entry.name) == pid or int(fields[1]) == pid:
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


async def drive(port: int, requests: list[bytes], concurrency: int) -> float:
    """Send all requests; seconds it took. Raises on any answer that is not 200."""
    loop = asyncio.get_running_loop()
    shared = iter(requests)
    started = time.perf_counter()
    clients, waits = [], []
    for _ in range(concurrency):
        done: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(
            lambda done=done: Client(shared, done), "127.0.0.1", port
        )
        clients.append(client)
        waits.append(done)
    async with asyncio.timeout(300):
        await asyncio.gather(*waits)
    if sum(client.answers for client in clients) != len(requests) or any(c.bad for c in clients):
        raise RuntimeError("not every request was answered with 200")
    return time.perf_counter() - started


@asynccontextmanager
async def gateway(ports: list[int]) -> AsyncIterator[tuple[int, int]]:
    """`kvroute serve` on core 0: (pid, port)."""
    replicas = [part for p in ports for part in ("--replica", f"http://127.0.0.1:{p}")]
    command = ["taskset", "-c", "0", sys.executable, "-m", "router.cli", "serve", "--port", "0"]
    options = ["--tokenizer", str(default_folder()), "--log-level", "warning"]
    process = subprocess.Popen([*command, *options, *replicas], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        # In a thread: the replicas that the gateway probes at its start are in this process.
        line = await asyncio.to_thread(process.stdout.readline)
        yield process.pid, int(line.rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def nginx(ports: list[int]) -> AsyncIterator[tuple[int, int]]:
    """nginx on core 0 with one worker and keep-alive to the replicas: (pid, port)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers = "".join(f"server 127.0.0.1:{p};" for p in ports)
    with tempfile.TemporaryDirectory() as folder:
        text = f"""daemon off; worker_processes 1; pid {folder}/pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{ access_log off; client_max_body_size 64m; client_body_temp_path {folder}/b;
proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
scgi_temp_path {folder}/s; keepalive_requests 100000000;
upstream replicas {{ {servers} keepalive 128; keepalive_requests 100000000; }}
server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://replicas;
proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
proxy_request_buffering off; }} }} }}
"""
        path = Path(folder, "nginx.conf")
        path.write_text(text)
        process = subprocess.Popen(["taskset", "-c", "0", "nginx", "-c", str(path)])
        try:
            await asyncio.sleep(0.5)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait(10)


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """CPU milliseconds per request, by target and body, one figure per repeat."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(InstantReplica, "127.0.0.1", 0) for _ in range(4)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    targets = {"kvroute": gateway}
    if shutil.which("nginx"):
        targets["nginx"] = nginx
    figures: dict[str, dict[str, list[float]]] = {}
    for repeat in range(arguments.repeats):
        for name, start in targets.items():
            async with start(ports) as (pid, port):
                for size, count in ((0, arguments.requests), (32_000, arguments.requests // 5)):
                    batch = [request_bytes(size, repeat * count + i) for i in range(count)]
                    await drive(port, batch[: count // 10], arguments.concurrency)
                    before = cpu_s(pid)
                    await drive(port, batch, arguments.concurrency)
                    used_ms = (cpu_s(pid) - before) / count * 1000
                    label = "tiny" if size == 0 else f"{size // 1000} KB"
                    figures.setdefault(label, {}).setdefault(name, []).append(used_ms)
    for server in servers:
        server.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {1})
    figures = uvloop.run(measure(arguments))
    for label, by_target in figures.items():
        for name, values in by_target.items():
            middle = statistics.median(values)
            spread = f"[{min(values):.3f}-{max(values):.3f}]"
            ratio = middle / statistics.median(by_target.get("nginx", values))
            print(f"{label:>6}  {name:8} {middle:.3f} ms {spread}  {ratio:.2f} x nginx")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
