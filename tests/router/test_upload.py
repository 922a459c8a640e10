"""Forms that are passed on while they arrive: who may pause, for how long, and what comes of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.planning import FORM_BYTES_PER_TOKEN
from tests.router.raw import Wire, head
from tests.router.support import (
    ScriptedReplica,
    Seen,
    json_answer,
    running_gateway,
)

PATH = b"/v1/audio/transcriptions"
KIND = b"content-type: multipart/form-data; boundary=b"
FIELD = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--b\r\n'
LENGTH = b"content-length: %d"
QUEUED = "kvroute_queued_prefill_tokens{"


class Form(ScriptedReplica):
    """Reads the head of a form and leaves the rest to the script."""

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        try:
            text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = text.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
        return Seen(method, target, headers, b"")


class Received:
    """A script: reads as much of the form as it says it has, then answers."""

    def __init__(self) -> None:
        self.body = b""
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        length = int(seen.header("content-length") or 0)
        try:
            while len(self.body) < length:
                piece = await reader.read(65536)
                if not piece:
                    raise ConnectionError
                self.body += piece
                self.begun.set()
        finally:
            self.ended.set()
        writer.write(json_answer({"bytes": length}))


async def test_a_form_that_never_names_its_model_is_a_408_and_no_replica_is_asked() -> None:
    script = Received()
    replica = Form(script)
    await replica.start()
    async with running_gateway(replica, body_timeout_s=0.1) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(head(KIND, LENGTH % 1000, target=PATH) + b"--b\r\n")
            answer = await wire.answer()
            assert (answer.status, answer.code) == (408, "body_timeout")
            assert answer.closes
        assert replica.seen == []
        await running.becomes_idle()
    await replica.stop()


async def test_a_client_that_stops_within_a_form_is_a_408_and_the_replica_is_let_go() -> None:
    script = Received()
    replica = Form(script)
    await replica.start()
    async with running_gateway(replica, body_timeout_s=0.15) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(head(KIND, LENGTH % 1000, target=PATH) + FIELD)
            async with asyncio.timeout(5):
                await script.begun.wait()
            answer = await wire.answer()
            assert (answer.status, answer.code) == (408, "body_timeout")
            assert "Nothing more of the form" in json.loads(answer.body)["error"]["message"]
            assert answer.closes
            async with asyncio.timeout(5):
                await script.ended.wait()
        assert script.body == FIELD and len(replica.seen) == 1
        assert running.gateway.fleet.replicas[replica.name].state == "up"  # it did no wrong
        await running.becomes_idle()
    await replica.stop()


async def test_a_slow_form_is_served_however_long_it_takes_in_all() -> None:
    script = Received()
    replica = Form(script)
    await replica.start()
    pieces = [b"x" * 10] * 12
    async with running_gateway(replica, body_timeout_s=0.5) as running:
        async with await Wire.to(running.port) as wire:
            size = len(FIELD) + sum(map(len, pieces))
            wire.send(head(KIND, LENGTH % size, target=PATH) + FIELD)
            for piece in pieces:
                await asyncio.sleep(0.06)  # together longer than `body_timeout_s`
                wire.send(piece)
            answer = await wire.answer()
            assert (answer.status, json.loads(answer.body)) == (200, {"bytes": size})
        assert script.body == FIELD + b"".join(pieces)
    await replica.stop()


async def test_a_replica_that_does_not_read_a_form_is_a_504_within_its_idle_limit() -> None:
    stopped = asyncio.Event()

    async def deaf(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await stopped.wait()
        raise ConnectionError

    replica = Form(deaf)
    await replica.start()
    async with running_gateway(replica, idle_timeout_s=0.2, request_timeout_s=30) as running:
        async with await Wire.to(running.port) as wire:
            size = 40 << 20  # more than the sockets between them hold
            wire.send(head(KIND, LENGTH % size, target=PATH) + FIELD)
            wire.send(b"x" * (size - len(FIELD)))
            answer = await wire.answer()
            assert (answer.status, answer.code) == (504, "replica_timeout")
        stopped.set()
        await running.becomes_idle()
    await replica.stop()


async def test_a_form_does_not_wait_for_a_replica_that_is_found_down() -> None:
    """Nor does its load: while nobody reads, a client's leaving is not noticed."""
    stopped = asyncio.Event()

    async def deaf(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        hung.health = "503 Service Unavailable"
        await stopped.wait()
        raise ConnectionError

    hung = Form(deaf)
    await hung.start()
    async with running_gateway(hung, idle_timeout_s=600, request_timeout_s=600) as running:
        async with await Wire.to(running.port) as wire:
            size = 40 << 20  # more than the sockets between them hold
            wire.send(head(KIND, LENGTH % size, target=PATH) + FIELD)
            wire.send(b"x" * (size - len(FIELD)))
            answer = await wire.answer()
            assert (answer.status, answer.code) == (503, "no_replica")
            assert b"is down" in answer.body and b"Send it again" in answer.body
            await running.becomes_idle()
        stopped.set()
    await hung.stop()


async def test_a_replica_that_does_not_read_a_long_request_is_given_up_for_another() -> None:
    """The limits of a late answer hold from the first byte on, not once all has been read."""
    stopped = asyncio.Event()

    async def deaf(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        hung.health = "503 Service Unavailable"
        await stopped.wait()
        raise ConnectionError

    async def well(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int(seen.header("content-length") or 0)
        await reader.readexactly(length)
        writer.write(json_answer({"bytes": length}))

    hung, other = Form(deaf), Form(well)
    await hung.start()
    await other.start()
    async with running_gateway(hung, other, request_timeout_s=30) as running:
        body = b'{"model":"sim","input":"' + b"x" * (24 << 20) + b'"}'
        answers = [await running.post(body, path="/v1/embeddings") for _ in range(2)]
        assert [each.json() for each in answers] == [{"bytes": len(body)}] * 2
        assert len(hung.seen) == 1
        stopped.set()
        await running.becomes_idle()
    await hung.stop()
    await other.stop()


async def test_bytes_of_speech_are_not_counted_as_text() -> None:
    """300 kB would be 75,000 tokens of a prompt: nothing else would be sent there for long."""
    go_on = asyncio.Event()

    async def waits(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int(seen.header("content-length") or 0))
        await go_on.wait()
        writer.write(json_answer({"ok": True}))

    replica = Form(waits)
    await replica.start()
    async with running_gateway(replica) as running, await Wire.to(running.port) as wire:
        wire.send(head(KIND, LENGTH % 300_000, target=PATH) + FIELD)
        wire.send(b"x" * (300_000 - len(FIELD)))
        async with asyncio.timeout(5):
            while not replica.seen:
                await asyncio.sleep(0.01)
        text = (await running.client.get("/metrics")).text
        (queued,) = [each for each in text.splitlines() if each.startswith(QUEUED)]
        assert float(queued.rpartition(" ")[2]) == 300_000 // FORM_BYTES_PER_TOKEN
        go_on.set()
        assert (await wire.answer()).status == 200
        await running.becomes_idle()
    await replica.stop()


async def test_a_small_form_in_pieces_is_sent_again_when_its_replica_dies() -> None:
    async def closes(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(len(FIELD))
        writer.transport.abort()
        raise ConnectionError

    served = Received()
    bad, good = Form(closes), Form(served)
    await bad.start()
    await good.start()
    async with running_gateway(bad, good) as running:
        for _ in range(2):
            served.body = b""
            async with await Wire.to(running.port) as wire:
                size = len(FIELD) + 200_000
                wire.send(head(KIND, LENGTH % size, target=PATH) + FIELD)
                for _ in range(4):
                    await asyncio.sleep(0.02)
                    wire.send(b"x" * 50_000)
                answer = await wire.answer()
                assert (answer.status, json.loads(answer.body)) == (200, {"bytes": size})
            assert served.body == FIELD + b"x" * 200_000
        assert bad.seen
    await bad.stop()
    await good.stop()


@pytest.mark.parametrize(
    ("path", "code", "again"),
    [
        (PATH, "no_replica", None),
        (b"/v1/files", "request_dropped", "false"),
    ],
)
async def test_a_form_whose_replica_closes_is_for_the_client_to_send_again_or_not(
    path: bytes, code: str, again: str | None
) -> None:
    """Speech may be sent again by any client; a file may be there already, though nobody said."""

    async def closes(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(len(FIELD))
        writer.transport.abort()
        raise ConnectionError

    one, two = Form(closes), Form(closes)
    await one.start()
    await two.start()
    async with running_gateway(one, two) as running, await Wire.to(running.port) as wire:
        wire.send(head(KIND, LENGTH % 1000, target=path) + FIELD)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (503, code)
        assert answer.headers.get("x-should-retry") == again
        assert ("retry-after" in answer.headers) is (again is None)
        assert len(one.seen) + len(two.seen) == 1
    await one.stop()
    await two.stop()
