"""Speed of the simulated replicas: requests per CPU second in virtual time, CPU per streamed
chunk, memory of one process with eight replicas.

    python benchmarks/replica.py
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from random import Random

from loadgen.replica.engine import Engine, EngineModel, EngineRequest

REQUESTS = 4000
REPLICAS = 8
STREAMS_PER_REPLICA = 4
STREAM_S = 8.0
CLOCK_TICKS = 100


def traffic() -> list[tuple[float, list[int]]]:
    """(arrival, prompt): 2,000 tokens of which 1,500 are one of 40 shared beginnings."""
    random = Random(1)
    shared = [[random.randrange(4000) for _ in range(1500)] for _ in range(40)]
    now_s, listed = 0.0, []
    for _ in range(REQUESTS):
        now_s += random.expovariate(5.0)
        own = [random.randrange(4000) for _ in range(500)]
        listed.append((now_s, random.choice(shared) + own))
    return listed


def virtual(record_events: bool) -> float:
    """Requests per CPU second."""
    arrivals, engine = traffic(), Engine(EngineModel(blocks=20_000), record_events=record_events)
    begun_s, now_s, place, done = time.process_time(), 0.0, 0, 0
    while done < REQUESTS:
        while place < REQUESTS and arrivals[place][0] <= now_s:
            engine.add(EngineRequest(str(place), arrivals[place][1], 64), now_s)
            place += 1
        upcoming_s = arrivals[place][0] if place < REQUESTS else inf
        result = engine.step(now_s, upcoming_s)
        if result is None:
            now_s = upcoming_s
            continue
        now_s = result.end_s
        done += len(result.finished)
    return REQUESTS / (time.process_time() - begun_s)


async def stream(url: str, until_s: float) -> int:
    """Chunks received from one replica, one stream after the other."""
    host, port = url.removeprefix("http://").split(":")
    message = {"role": "user", "content": "Hello " * 200}
    body = json.dumps({"messages": [message], "max_tokens": 200, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    chunks = 0
    reader, writer = await asyncio.open_connection(host, int(port))
    while time.monotonic() < until_s:
        writer.write(request)
        ended = False
        while not ended:
            data = await reader.read(65536)
            chunks += data.count(b"data: ")
            ended = b"[DONE]" in data or not data
    writer.close()
    return chunks


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def served() -> None:
    command = [sys.executable, "-m", "loadgen.replica", "--replicas", str(REPLICAS)]
    command += ["--decode-step", "0.02", "--decode-per-request", "0", "--exit-on-stdin-eof"]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    line = json.loads(await process.stdout.readline())
    idle_mb, begun_cpu_s, begun_s = resident_mb(process.pid), cpu_s(process.pid), time.monotonic()
    urls = [replica["url"] for replica in line["replicas"]] * STREAMS_PER_REPLICA
    chunks = sum(await asyncio.gather(*(stream(url, begun_s + STREAM_S) for url in urls)))
    took_s, used_s = time.monotonic() - begun_s, cpu_s(process.pid) - begun_cpu_s
    print(f"{REPLICAS} replicas, {chunks / took_s:.0f} chunks/s: {used_s / took_s:.1%} of a core")
    print(f"memory: {idle_mb:.0f} MB idle, {resident_mb(process.pid):.0f} MB after")
    process.stdin.close()
    await process.wait()


def main() -> None:
    print(f"virtual time: {virtual(False):.0f} requests per CPU second without events")
    print(f"virtual time: {virtual(True):.0f} requests per CPU second with events")
    asyncio.run(served())


if __name__ == "__main__":
    main()
