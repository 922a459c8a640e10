"""Whatever a replica does to HTTP: the client gets a right answer or a clear error, soon."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from cache_index.types import Holder
from tests.chaos.client import Answer, ask, chat_body, read_answer
from tests.router.raw import Wire, post
from tests.router.support import (
    MODEL,
    SSE_HEAD,
    Running,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    chunk,
    closed_port,
    json_answer,
    running_gateway,
    scripted,
)

pytestmark = pytest.mark.slow

SOON_S = 3.0
"""Well past every time-out set here."""
GOOD = b'{"from":"good"}'
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


def says(*pieces: bytes, then: str = "close") -> Callable[[Seen, Reader, Writer], Awaitable[None]]:
    """A script: these bytes, then the connection is closed, reset, half-closed or kept silent."""

    async def script(seen: Seen, reader: Reader, writer: Writer) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if then == "reset":
            reset(writer)
        elif then == "close":
            writer.close()
            raise ConnectionError
        elif then == "half-close":
            writer.write_eof()
            await reader.read(1)
        elif then == "silence":
            await reader.read(1)
            raise ConnectionError

    return script


def reset(writer: Writer) -> None:
    """RST instead of FIN: what was written and not read yet is lost too."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise ConnectionError


async def good(seen: Seen, reader: Reader, writer: Writer) -> None:
    if b'"stream": true' in seen.body:
        writer.write(SSE_HEAD + chunk(b"data: " + GOOD + b"\n\n") + chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")
    else:
        writer.write(json_answer(json.loads(GOOD)))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"

NOTHING_ARRIVED = {
    "closed at once": says(),
    "reset at once": says(then="reset"),
    "half-closed at once": says(then="half-close"),
    "closed within the status line": says(b"HTTP/1.1 20"),
    "reset within the head": says(HEAD, then="reset"),
    "closed within the head": says(HEAD + b"content-le"),
    "garbage": says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20),
    "another protocol": says(b"SSH-2.0-OpenSSH_9.7\r\n", then="silence"),
    "a head that never ends": says(HEAD, *[b"x-%d: %s\r\n" % (n, b"y" * 999) for n in range(99)]),
    "one endless header": says(HEAD + b"x: ", *[b"y" * 9999] * 20, then="silence"),
    "an informal answer and no other": says(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    "a switch of protocols": says(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello"
    ),
    "a bare CR in a header": says(
        HEAD + b"x-a: 1\rset-cookie: a=b\r\ncontent-length: 2\r\n\r\n{}", then="silence"
    ),
    "a NUL in a header": says(HEAD + b"x-a: 1\0\r\ncontent-length: 2\r\n\r\n{}", then="silence"),
    "two different lengths": says(
        HEAD + b"content-length: 2\r\ncontent-length: 20\r\n\r\n{}", then="silence"
    ),
    "a length and chunks": says(
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        then="silence",
    ),
    "a transfer coding that was not asked for": says(
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", then="silence"
    ),
    "a negative length": says(HEAD + b"content-length: -5\r\n\r\n{}", then="silence"),
    "a head and no body": says(HEAD + b"content-length: 99\r\n\r\n"),
    "a head and a reset": says(HEAD + b"content-length: 99\r\n\r\n", then="reset"),
    "a head and half a close": says(HEAD + b"content-length: 99\r\n\r\n", then="half-close"),
    "the head of a stream": says(SSE_HEAD),
    "the head of a stream and a reset": says(SSE_HEAD, then="reset"),
    "a stream of garbage": says(SSE_HEAD + b"ZZZ\r\ndata: 1\n\n\r\n", then="silence"),
}


@dataclass
class Pair:
    """A gateway before a bad replica and a good one; requests alternate."""

    running: Running
    bad: ScriptedReplica
    good: ScriptedReplica

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.running.port}"

    async def ask(self, stream: bool = False) -> Answer:
        async with asyncio.timeout(SOON_S):
            return await ask(self.url, chat_body(model=MODEL, stream=stream))


@asynccontextmanager
async def pair(script: Callable[[Seen, Reader, Writer], Awaitable[None]]) -> AsyncIterator[Pair]:
    limits = {"first_byte_timeout_s": 0.5, "idle_timeout_s": 0.5}
    async with scripted(script, good) as (bad, fine):
        async with running_gateway(bad, fine, **limits) as running:
            yield Pair(running, bad, fine)
            await running.becomes_idle()


@pytest.mark.parametrize("fault", NOTHING_ARRIVED)
async def test_no_request_fails_that_had_not_received_a_byte(fault: str) -> None:
    async with pair(NOTHING_ARRIVED[fault]) as both:
        for stream in (False, True, False, True):
            answer = await both.ask(stream)
            assert answer.complete, f"{answer}"
            assert answer.replica == both.good.name
            assert GOOD in answer.body.replace(b" ", b"")
        asked = {b'"stream": true' in each.body for each in both.bad.seen}
        assert asked == {False, True}, "the faulty replica was not asked"


async def test_a_refused_connection_costs_nothing() -> None:
    async with scripted(good) as (fine,):
        dead = f"http://127.0.0.1:{closed_port()}"
        async with running_gateway(dead, fine) as running:
            for _ in range(4):
                url = f"http://127.0.0.1:{running.port}"
                assert (await ask(url, chat_body(model=MODEL))).complete
            await running.becomes_idle()


async def test_a_returned_replica_gets_its_trial_though_others_look_better() -> None:
    """Its cache is empty and the others are idle: nothing else would ever send it a request."""
    index = TaughtIndex()
    async with scripted(good, good) as (back, holder):
        index.holds = lambda root, hashes: {Holder(holder.name, 0, "device"): len(hashes)}
        async with running_gateway(back, holder, policy="cost", index=index) as running:
            ids = {"model": MODEL, "prompt": list(range(400)), "max_tokens": 1}
            body = json.dumps(ids).encode()

            async def answered_by() -> str:
                answer = await running.post(body, "/v1/completions")
                assert answer.status_code == 200
                name: str = answer.headers["x-kvroute-replica"]
                return name

            assert {await answered_by() for _ in range(4)} == {holder.name}
            replica = running.gateway.fleet.replicas[back.name]
            await back.stop()
            async with asyncio.timeout(SOON_S):
                while replica.healthy:
                    await asyncio.sleep(0.01)
            await back.start(back.port)
            async with asyncio.timeout(SOON_S):
                while replica.state != "half_open":
                    await asyncio.sleep(0.01)
            assert await answered_by() == back.name
            assert replica.state == "slow_start"
            assert {await answered_by() for _ in range(4)} == {holder.name}


EVENT = chunk(b'data: {"n":1}\n\n')
CUT_STREAMS = {
    "closed": says(SSE_HEAD + EVENT),
    "reset": says(SSE_HEAD + EVENT, then="reset"),
    "half-closed": says(SSE_HEAD + EVENT, then="half-close"),
    "stalled": says(SSE_HEAD + EVENT, then="silence"),
    "garbage after an event": says(SSE_HEAD + EVENT + b"no chunk\r\n", then="silence"),
    "closed within a chunk": says(SSE_HEAD + EVENT + b'40\r\ndata: {"n"'),
    "closed within a chunk's size": says(SSE_HEAD + EVENT + b"4"),
    "closed after [DONE] but before its end": says(SSE_HEAD + EVENT + b"5\r\n"),
    "closed before its stated length": says(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n"
        b'data: {"n":1}\n\n'
    ),
    "an enormous chunk size": says(SSE_HEAD + EVENT + b"f" * 20 + b"\r\n", then="silence"),
}


@pytest.mark.parametrize("fault", CUT_STREAMS)
async def test_a_cut_stream_ends_as_one(fault: str) -> None:
    async with pair(CUT_STREAMS[fault]) as both:
        answers = [await both.ask(stream=True) for _ in range(2)]
        (bad,) = [each for each in answers if each.replica == both.bad.name]
        assert bad.cut, f"{bad}"
        assert bad.events[0] == b'data: {"n":1}'


async def test_a_compressed_stream_that_is_cut_gets_no_plain_event() -> None:
    piece = gzip.compress(b'data: {"n":1}\n\n')[:-9]
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    async with pair(says(head + chunk(piece))) as both:
        answers = [await both.ask(stream=True) for _ in range(2)]
        (bad,) = [each for each in answers if each.replica == both.bad.name]
        assert (bad.body, bad.whole) == (piece, False)


async def test_a_stream_of_known_length_arrives_whole() -> None:
    events = b'data: {"n":1}\n\ndata: [DONE]\n\n'
    head = SSE_HEAD.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(events))
    async with pair(says(head + events, then="silence")) as both:
        answers = [await both.ask(stream=True) for _ in range(2)]
        (whole,) = [each for each in answers if each.replica == both.bad.name]
        assert whole.complete and whole.body == events, f"{whole}"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_may_state_a_length(status: str) -> None:
    """A 304 says how long the body would be; the next answer on the connection is read right."""
    bare = f"HTTP/1.1 {status}\r\ncontent-length: 99\r\n\r\n".encode()
    answers = iter([bare, json_answer({"next": True})])

    async def script(seen: Seen, reader: Reader, writer: Writer) -> None:
        writer.write(next(answers))

    async with scripted(script) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat_body(model=MODEL)))
            first = await wire.answer(head_only=True)
            assert first.status == int(status[:3]) and not first.closes
            wire.send(post(chat_body(model=MODEL)))
            assert json.loads((await wire.answer()).body) == {"next": True}


CUT_BODIES = {
    "closed": says(HEAD + b'content-length: 99\r\n\r\n{"ok'),
    "reset": says(HEAD + b'content-length: 99\r\n\r\n{"ok', then="reset"),
    "half-closed": says(HEAD + b'content-length: 99\r\n\r\n{"ok', then="half-close"),
    "stalled": says(HEAD + b'content-length: 99\r\n\r\n{"ok', then="silence"),
    "chunks without an end": says(HEAD + b'transfer-encoding: chunked\r\n\r\n4\r\n{"ok\r\n'),
}


@pytest.mark.parametrize("fault", CUT_BODIES)
async def test_a_cut_body_cannot_pass_for_a_whole_one(fault: str) -> None:
    async with pair(CUT_BODIES[fault]) as both:
        answers = [await both.ask() for _ in range(2)]
        (bad,) = [each for each in answers if each.replica == both.bad.name]
        assert not bad.whole, f"{bad}"
        assert bad.body == b'{"ok'


SECOND = b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"evil"}'
SURPLUS = {
    "more than its length": b"EXTRA",
    "a second answer": SECOND,
    "an error that ends the connection": b"HTTP/1.1 408 Timeout\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("at", ["with it", "a moment later"])
@pytest.mark.parametrize("surplus", SURPLUS)
async def test_bytes_after_an_answer_reach_nobody(surplus: str, at: str) -> None:
    """Least of all the next request on that connection."""

    async def script(seen: Seen, reader: Reader, writer: Writer) -> None:
        answer = json_answer(json.loads(GOOD))
        if at == "with it":
            writer.write(answer + SURPLUS[surplus])
            return
        writer.write(answer)
        await asyncio.sleep(0.05)
        writer.write(SURPLUS[surplus])
        await writer.drain()

    async with scripted(script) as (replica,), running_gateway(replica) as running:
        url = f"http://127.0.0.1:{running.port}"
        for _ in range(4):
            answer = await ask(url, chat_body(model=MODEL))
            assert answer.complete and json.loads(answer.body) == json.loads(GOOD), f"{answer}"
            await asyncio.sleep(0.1)
        await running.becomes_idle()


class HeadReader(ScriptedReplica):
    """Reads the head of a POST and leaves its body where it is."""

    async def _read(self, reader: Reader) -> Seen | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None
        method, target, _ = head.decode().split(" ", 2)
        return Seen(method, target, [], b"")


async def test_an_answer_before_the_request_was_read_is_passed_on() -> None:
    """A refusal by size: the replica answers, reads no further and keeps the connection."""
    left = asyncio.Event()

    async def refuse(seen: Seen, reader: Reader, writer: Writer) -> None:
        writer.write(json_answer({"error": "too long"}, "413 Content Too Large"))
        await writer.drain()
        await left.wait()
        raise ConnectionError

    replica = HeadReader(refuse)
    await replica.start()
    try:
        async with running_gateway(replica) as running:
            url = f"http://127.0.0.1:{running.port}"
            async with asyncio.timeout(SOON_S):
                answer = await ask(url, chat_body("x" * (24 << 20), model=MODEL))
            assert answer.status == 413 and b"too long" in answer.body
            await running.becomes_idle()
    finally:
        left.set()
        await replica.stop()


async def test_a_connection_with_half_a_request_is_not_used_again() -> None:
    """The replica would take the next request for the rest of the form before it."""
    first = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--b\r\n'
    kind = "content-type: multipart/form-data; boundary=b\r\ncontent-length: 99999\r\n"
    upload = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\n{kind}\r\n".encode()

    async def echo(seen: Seen, reader: Reader, writer: Writer) -> None:
        if seen.method == "POST":
            used.append(writer)
        if seen.target.endswith("transcriptions"):
            await reader.read(65536)  # what has come of the form
        writer.write(json_answer({"target": seen.target}))

    used: list[Writer] = []
    replica = HeadReader(echo)
    await replica.start()
    try:
        async with running_gateway(replica) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(upload + first)
            answer = Answer()
            async with asyncio.timeout(SOON_S):
                await read_answer(reader, answer)
            assert json.loads(answer.body) == {"target": "/v1/audio/transcriptions"}
            other = await running.client.post("/v1/rerank", json={"model": MODEL})
            assert other.json() == {"target": "/v1/rerank"}
            assert used[0] is not used[1]
            writer.transport.abort()
            await running.becomes_idle()
    finally:
        await replica.stop()


async def test_a_head_that_drips_in_is_no_beginning() -> None:
    """Bytes alone do not hold up `first_byte_timeout_s`: it limits how late an answer begins."""

    async def drip(seen: Seen, reader: Reader, writer: Writer) -> None:
        for letter in HEAD * 100:
            writer.write(bytes([letter]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with scripted(drip) as (replica,):
        async with running_gateway(replica, first_byte_timeout_s=0.4) as running:
            async with asyncio.timeout(SOON_S):
                answer = await ask(f"http://127.0.0.1:{running.port}", chat_body(model=MODEL))
            assert answer.status == 504
            await running.becomes_idle()


@pytest.mark.parametrize("before", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
async def test_informal_answers_are_not_the_answer(before: bytes) -> None:
    first = b"HTTP/1.1 %b\r\nx-hint: 1\r\n\r\n" % before
    script = says(first, first, json_answer(json.loads(GOOD)), then="silence")
    async with scripted(script) as (replica,), running_gateway(replica) as running:
        answer = await ask(f"http://127.0.0.1:{running.port}", chat_body(model=MODEL))
        assert answer.complete and "x-hint" not in answer.headers


async def test_a_folded_header_cannot_split_the_answer() -> None:
    body = b"\r\ncontent-length: 2\r\n\r\n{}"
    script = says(HEAD + b"x-a: 1\r\n x-injected: 2" + body, then="silence")
    async with scripted(script) as (replica,), running_gateway(replica) as running:
        answer = await ask(f"http://127.0.0.1:{running.port}", chat_body(model=MODEL))
        assert "x-injected" not in answer.headers
        assert answer.status == 503 or "\n" not in answer.headers["x-a"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_silent_replica_costs_its_time_limit_and_no_more(stream: bool) -> None:
    async with pair(says(then="silence")) as both:
        answers = [await both.ask(stream) for _ in range(2)]
        statuses = sorted(each.status for each in answers)
        assert statuses == [200, 504]
        late = next(each for each in answers if each.status == 504)
        assert json.loads(late.body)["error"]["code"] == "replica_timeout"
        assert 0.4 < late.seconds < 1.5
