"""How the gateway ends: in a process of its own, by signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.router.raw import Wire, head, post
from tests.router.support import (
    ScriptedReplica,
    Streams,
    chat,
    running_gateway,
    scripted,
)
from tests.whole import Process, start_gateway

READY = head(method=b"GET", target=b"/readyz")


@asynccontextmanager
async def gateway_process(*replicas: ScriptedReplica) -> AsyncIterator[tuple[Process, int]]:
    process, url = await asyncio.to_thread(start_gateway, [each.url for each in replicas])
    try:
        port = int(url.rsplit(":", 1)[1])
        async with asyncio.timeout(10), await Wire.to(port) as wire:
            while True:
                wire.send(READY)
                if (await wire.answer()).status == 200:
                    break
                await asyncio.sleep(0.02)
        yield process, port
    finally:
        await asyncio.to_thread(process.kill)


async def begin_stream(port: int) -> Wire:
    wire = await Wire.to(port)
    wire.send(post(chat(stream=True)))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(b"data: 1\n\n\r\n")
    return wire


async def exit_code(process: Process) -> int:
    async with asyncio.timeout(8):
        return await asyncio.to_thread(process.popen.wait)


async def test_a_draining_gateway_says_so_and_ends_connections_with_their_answers() -> None:
    streams = Streams()
    async with scripted(streams) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as kept, await Wire.to(running.port) as other:
            kept.send(post(chat()))
            assert not (await kept.answer()).closes
            running.gateway.drain()
            other.send(READY)
            answer = await other.answer()
            assert answer.status == 503 and answer.closes
            assert await other.ended() == b""
            kept.send(post(chat()))
            answer = await kept.answer()
            assert answer.status == 200 and answer.closes
            assert await kept.ended() == b""


@pytest.mark.slow
async def test_sigterm_lets_streams_finish(monkeypatch: Any) -> None:
    monkeypatch.setenv("KVROUTE_DRAIN_NOTICE_S", "0.5")
    streams = Streams()
    async with scripted(streams) as (replica,), gateway_process(replica) as (process, port):
        async with await begin_stream(port) as stream, await Wire.to(port) as kept:
            kept.send(READY)
            assert (await kept.answer()).status == 200
            async with await Wire.to(port) as idle:
                process.popen.send_signal(signal.SIGTERM)
                ready = 200
                while ready == 200:  # until the signal has been noticed
                    async with await Wire.to(port) as probe:
                        probe.send(READY)
                        ready = (await probe.answer()).status
                assert ready == 503
                kept.send(post(chat()))  # during the notice, requests are still served
                answer = await kept.answer()
                assert answer.status == 200 and answer.closes
                assert await idle.ended() == b""
            async with asyncio.timeout(5):
                with pytest.raises(ConnectionRefusedError):
                    while True:
                        async with await Wire.to(port):
                            await asyncio.sleep(0.01)
            assert process.popen.stdin is not None
            process.popen.stdin.close()  # the parent's end is no second signal
            streams.go_on.set()
            assert (await stream.ended()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert await exit_code(process) == 0


@pytest.mark.slow
async def test_what_has_not_finished_by_the_deadline_is_cut_with_an_error_event(
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("KVROUTE_DRAIN_S", "0.2")
    streams = Streams()
    async with scripted(streams) as (replica,), gateway_process(replica) as (process, port):
        async with await begin_stream(port) as stream:
            process.popen.send_signal(signal.SIGTERM)
            rest = await stream.ended()
            assert b"event: error\n" in rest and b'"code":"gateway_shutting_down"' in rest
            assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")
        assert await exit_code(process) == 0
        assert streams.left.is_set()


@pytest.mark.slow
async def test_a_second_signal_stops_at_once() -> None:
    async with scripted(Streams()) as (replica,), gateway_process(replica) as (process, port):
        async with await begin_stream(port) as stream, await Wire.to(port) as idle:
            process.popen.send_signal(signal.SIGTERM)
            assert await idle.ended() == b""  # the drain has begun
            process.popen.send_signal(signal.SIGTERM)
            assert b'"code":"gateway_shutting_down"' in await stream.ended()
        assert await exit_code(process) == 1


LOAD = 60


async def whole_stream(port: int, begun: asyncio.Event) -> bytes:
    """Everything that one stream brings; `begun` is set once all of them have begun."""
    async with await begin_stream(port) as wire:
        begun.set()
        async with asyncio.timeout(15):
            return await wire.reader.read()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_under_load(monkeypatch: Any, signals: int) -> None:
    """One: every stream ends whole and nobody new comes in. Two: every stream ends at once."""
    monkeypatch.setenv("KVROUTE_DRAIN_NOTICE_S", "0.5")
    streams = Streams()
    async with (
        scripted(streams, streams) as replicas,
        gateway_process(*replicas) as (process, port),
    ):
        begun = [asyncio.Event() for _ in range(LOAD)]
        tasks = [asyncio.create_task(whole_stream(port, each)) for each in begun]
        async with asyncio.timeout(15):
            await asyncio.gather(*(each.wait() for each in begun))
        process.popen.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:
            async with await Wire.to(port) as probe:
                probe.send(READY)
                status = (await probe.answer()).status
        assert status == 503
        async with asyncio.timeout(5):
            with pytest.raises(ConnectionRefusedError):
                while True:
                    async with await Wire.to(port):
                        await asyncio.sleep(0.01)
        assert not any(each.done() for each in tasks), "a stream ended with the listener"
        if signals == 2:
            process.popen.send_signal(signal.SIGTERM)
        else:
            streams.go_on.set()
        ends = await asyncio.gather(*tasks)
        if signals == 2:
            assert all(b'"code":"gateway_shutting_down"' in each for each in ends)
            assert not any(b"[DONE]" in each or each.endswith(b"0\r\n\r\n") for each in ends)
        else:
            assert all(each.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for each in ends)
        assert await exit_code(process) == signals - 1
