import asyncio
import contextlib
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

COMMAND = (sys.executable, "-m", "loadgen.replica")


@asynccontextmanager
async def running(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """The process and its start-up line; killed if it is still there at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            yield process, json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_start_up_line_and_sigterm() -> None:
    async with running("--replicas", "2", "--ranks", "2") as (process, line):
        assert len({replica["url"] for replica in line["replicas"]}) == 2
        for replica in line["replicas"]:
            assert len(set(replica["kv_events"] + replica["replay"])) == 4
            async with httpx.AsyncClient(base_url=replica["url"]) as client:
                assert (await client.get("/health")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert process.stdout is not None
        assert await process.stdout.read() == b""


async def test_flavor_and_faults_reach_the_replicas() -> None:
    options = ("--flavor", "sglang", "--faults", '{"refuse_status": 429, "times": 1}')
    async with running(*options) as (_process, line):
        async with httpx.AsyncClient(base_url=line["replicas"][0]["url"]) as client:
            assert (await client.get("/get_server_info")).json()["dp_size"] == 1
            answers = [await client.post("/generate", json={"text": "a"}) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [429, 200]


async def test_ends_with_its_standard_input() -> None:
    async with running("--exit-on-stdin-eof") as (process, _line):
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0


async def test_problems_are_one_line_and_an_exit_code() -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--tokenizer", "/nonexistent", stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert error.startswith(b"loadgen replica: ")
    assert error.count(b"\n") == 1


def two_ports() -> int:
    """The first of two free ports in a row, below those that the kernel gives to anybody."""
    drawn = random.Random()
    while True:
        first = drawn.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in (first, first + 1):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


async def test_ports_can_be_chosen_and_taken_ones_are_named() -> None:
    taken = str(two_ports())
    async with running("--kv-port", taken) as (process, line):
        replica = line["replicas"][0]
        assert replica["kv_events"][0].rpartition(":")[2] == taken
        other = await asyncio.create_subprocess_exec(
            *COMMAND, "--kv-port", taken, stderr=asyncio.subprocess.PIPE
        )
        _, error = await asyncio.wait_for(other.communicate(), 20)
        assert other.returncode == 1
        assert b"in use" in error
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    async with running("--kv-port", taken) as (_, line):
        assert line["replicas"][0]["kv_events"] == replica["kv_events"]
