"""Many clients at once: busy ones, idle ones, and ones that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.chaos.client import address, ask, chat_body, get_text, head
from tests.chaos.fleet import ChaosFleet, chaos_fleet
from tests.router.support import MODEL, SSE_HEAD, ScriptedReplica, Seen, chunk
from tests.whole import start_gateway

pytestmark = pytest.mark.slow

BUSY, IDLE, SLOW = 1000, 2000, 50
FAST = ("--prefill-c", "0", "--prefill-a", "0", "--prefill-b", "0", "--max-num-seqs", "1024")


@pytest.fixture(autouse=True)
def enough_files() -> None:
    """The gateway inherits the limit: both ends of every connection count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


async def test_a_thousand_requests_at_once_all_succeed(tmp_path: Path) -> None:
    async with chaos_fleet(2, tmp_path, replica=(*FAST, "--decode-step", "0.2")) as fleet:
        started_s = time.monotonic()
        bodies = [chat_body(f"{n}", stream=n % 2 == 0, max_tokens=8) for n in range(BUSY)]
        tasks = [asyncio.create_task(ask(fleet.url, body)) for body in bodies]
        most = await most_running(fleet, tasks)
        answers = await asyncio.gather(*tasks)
        failed = [str(each) for each in answers if not each.complete]
        assert not failed, f"{len(failed)} of {BUSY} failed, e.g. {failed[:3]}"
        print(f"{BUSY} requests, {most:.0f} at once, {time.monotonic() - started_s:.1f} s")
        assert most > BUSY / 2
        await fleet.becomes_idle()


async def most_running(fleet: ChaosFleet, tasks: list[asyncio.Task[object]]) -> float:
    most = 0.0
    while not all(each.done() for each in tasks):
        most = max(most, sum((await fleet.metric("kvroute_running_requests")).values()))
        await asyncio.sleep(0.05)
    return most


async def test_idle_connections_cost_nobody_anything(tmp_path: Path) -> None:
    async with (
        chaos_fleet(1, tmp_path, replica=FAST) as fleet,
        contextlib.AsyncExitStack() as stack,
    ):
        before = rss_kib(fleet.pid)
        streams = []
        for _ in range(IDLE):
            reader, writer = await asyncio.open_connection(*address(fleet.url))
            stack.callback(writer.transport.abort)
            streams.append((reader, writer))
        answers = await asyncio.gather(
            *(ask(fleet.url, chat_body(f"{n}", max_tokens=2)) for n in range(50))
        )
        assert all(each.complete for each in answers)
        each_kib = (rss_kib(fleet.pid) - before) / IDLE
        print(f"{IDLE} idle connections, {each_kib:.1f} KiB each")
        assert each_kib < 32
        body = chat_body("at last", max_tokens=1)
        for reader, writer in streams[:: IDLE // 20]:  # they can still be used
            writer.write(head(body) + body)
            async with asyncio.timeout(5):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await fleet.becomes_idle()


def rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


class Flood:
    """A stream as fast as it is taken."""

    def __init__(self) -> None:
        self.written = 0

    async def __call__(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SSE_HEAD)
        event = chunk(b"data: " + b"x" * 32762 + b"\n\n")
        while True:
            writer.write(event)
            await writer.drain()
            self.written += len(event)
            await asyncio.sleep(0)


async def test_slow_readers_slow_their_streams_and_not_the_memory() -> None:
    flood = Flood()
    replica = ScriptedReplica(flood)
    await replica.start()
    gateway, url = await asyncio.to_thread(start_gateway, [replica.url])
    sockets: list[socket.socket] = []
    try:
        before = rss_kib(gateway.popen.pid)
        for _ in range(SLOW):
            sockets.append(await slow_reader(url))
        await still(flood)
        full, sent_mib = rss_kib(gateway.popen.pid), flood.written >> 20
        for _ in range(100):
            await read_a_little(sockets)
        moved_mib = (flood.written >> 20) - sent_mib
        after = rss_kib(gateway.popen.pid)
        print(f"RSS {before >> 10} MiB, {full >> 10} with {SLOW} stalled streams, {after >> 10}")
        print(f"after {moved_mib} MiB more")
        assert moved_mib > 50, "the readers were not slow but stuck"
        assert full - before < SLOW * 1024, "more than 1 MiB for each stream"
        assert after - full < 8 * 1024
    finally:
        for each in sockets:
            each.close()
        await idle(url)
        gateway.end()
        await replica.stop()


async def slow_reader(url: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address(url))
    body = chat_body(model=MODEL, stream=True)
    await loop.sock_sendall(sock, head(body) + body)
    return sock


async def read_a_little(sockets: list[socket.socket]) -> None:
    for each in sockets:
        with contextlib.suppress(BlockingIOError):
            each.recv(32768)
    await asyncio.sleep(0.01)


async def still(flood: Flood) -> None:
    """Until nothing more is taken: every buffer on the way is full."""
    async with asyncio.timeout(20):
        last = -1
        while flood.written != last:
            last = flood.written
            await asyncio.sleep(0.5)


async def idle(url: str) -> None:
    async with asyncio.timeout(10):
        while True:
            lines = (await get_text(url, "/metrics")).splitlines()
            loads = [line for line in lines if line.startswith("kvroute_running_requests{")]
            if all(line.endswith(" 0.0") for line in loads):
                return
            await asyncio.sleep(0.02)
