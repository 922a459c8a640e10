import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import zmq
import zmq.asyncio

from loadgen.replica.publisher import KVPublisher, ReplayFraming

END = b"\xff" * 8


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


Publishing = Callable[..., KVPublisher]


@pytest.fixture
async def publishing(context: zmq.asyncio.Context) -> AsyncIterator[Publishing]:
    """Starts publishers that end with the test, also where it fails."""
    async with AsyncExitStack() as stack:

        def start(**options: object) -> KVPublisher:
            publisher = KVPublisher(zmq.Context(context), host="127.0.0.1", **options)
            publisher.start()
            stack.push_async_callback(publisher.close)
            return publisher

        yield start


async def replayed(context: zmq.asyncio.Context, endpoint: str, start: int) -> list[list[bytes]]:
    """Frames of every reply, the end included."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    await socket.send_multipart([b"", seq(start)])
    replies = []
    async with asyncio.timeout(5):
        while not replies or replies[-1][-2] != END:
            replies.append(await socket.recv_multipart())
    socket.close(linger=0)
    return replies


async def test_live_batches_carry_topic_and_sequence(
    context: zmq.asyncio.Context, publishing: Publishing
) -> None:
    publisher = publishing(topic="kv")
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv")
    socket.connect(publisher.address.endpoint)
    async with asyncio.timeout(5):
        # A subscription takes effect some time after connect.
        sent = 0
        while not await socket.poll(10):
            publisher.publish(b"payload %d" % sent)
            sent += 1
        topic, number, payload = await socket.recv_multipart()
    assert topic == b"kv"
    assert payload == b"payload %d" % int.from_bytes(number, "big")
    socket.close(linger=0)


@pytest.mark.parametrize("framing", list(ReplayFraming))
async def test_replay_starts_where_asked(
    context: zmq.asyncio.Context, publishing: Publishing, framing: ReplayFraming
) -> None:
    publisher = publishing(topic="kv", framing=framing)
    for number in range(5):
        publisher.publish(b"%d" % number)
    replies = await replayed(context, publisher.address.replay_endpoint, 3)
    topic, none = ([b"kv"], [b""]) if framing is ReplayFraming.NEW else ([], [])
    assert replies == [
        [b"", *topic, seq(3), b"3"],
        [b"", *topic, seq(4), b"4"],
        [b"", *none, END, b""],
    ]


async def test_replay_reaches_back_as_far_as_the_buffer(
    context: zmq.asyncio.Context, publishing: Publishing
) -> None:
    publisher = publishing(buffer_steps=6000)
    for _ in range(6500):
        publisher.publish(bytes(2000))
    replies = await replayed(context, publisher.address.replay_endpoint, 0)
    assert [reply[2] for reply in replies[:-1]] == [seq(number) for number in range(500, 6500)]


async def test_nonsense_requests_are_ignored(
    context: zmq.asyncio.Context, publishing: Publishing
) -> None:
    publisher = publishing()
    publisher.publish(b"x")
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.address.replay_endpoint)
    await socket.send_multipart([b"", b"short"])
    await socket.send_multipart([b"nonsense"])
    socket.close(linger=100)
    replies = await replayed(context, publisher.address.replay_endpoint, 0)
    assert len(replies) == 2
