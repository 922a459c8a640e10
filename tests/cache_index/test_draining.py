"""The shared turn in which sockets are read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from cache_index.draining import Drain, Pump, RawSocket, read_frames

from .conftest import eventually

pytestmark = pytest.mark.asyncio


Pair = tuple[RawSocket, RawSocket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Two connected pairs: write on the left, read on the right."""
    context: zmq.Context[RawSocket] = zmq.Context()
    made: list[Pair] = []
    for name in ("a", "b"):
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        left.sndhwm = right.rcvhwm = 0
        right.bind(f"inproc://{name}")
        left.connect(f"inproc://{name}")
        made.append((left, right))
    yield made
    for pair in made:
        for socket in pair:
            socket.close(linger=0)
    context.destroy(linger=0)


async def test_everything_is_read_in_order_and_before_the_socket_says_more(
    pairs: list[Pair],
) -> None:
    left, right = pairs[0]
    for number in range(1000):
        left.send(b"%d" % number)
    seen: list[bytes] = []
    errors: list[Exception] = []
    drain = Drain(
        Pump(), right, read_frames, lambda got: seen.extend(m[0] for m in got), errors.append
    )
    await eventually(lambda: len(seen) == 1000)
    left.send(b"more")
    await eventually(lambda: seen[-1:] == [b"more"])
    assert seen[:-1] == [b"%d" % number for number in range(1000)]
    drain.close()
    left.send(b"unread")
    await asyncio.sleep(0.05)
    assert seen[-1] == b"more"
    assert not errors


async def test_a_flooded_socket_keeps_neither_the_loop_nor_another_socket(
    pairs: list[Pair],
) -> None:
    pump, errors = Pump(), list[Exception]()
    (flood, flooded), (quiet, calm) = pairs
    taken: list[int] = []
    answered: list[int] = []

    def take(messages: list[list[bytes]]) -> None:
        taken.append(len(messages))
        for _ in messages:
            flood.send(b"again")  # never empty

    def hear(messages: list[list[bytes]]) -> None:
        answered.extend(map(len, messages))

    flood.send_multipart([b"x"])
    for _ in range(50):
        flood.send(b"x")
    drains = [
        Drain(pump, flooded, read_frames, take, errors.append),
        Drain(pump, calm, read_frames, hear, errors.append),
    ]
    for number in range(20):
        quiet.send(b"x")
        await eventually(lambda number=number: len(answered) == number + 1)
    assert sum(taken) > 0
    for drain in drains:
        drain.close()


async def test_what_taking_raises_ends_the_reading_and_is_told(
    pairs: list[Pair],
) -> None:
    left, right = pairs[0]
    errors: list[Exception] = []

    def take(_: list[list[bytes]]) -> None:
        raise ValueError("no")

    drain = Drain(Pump(), right, read_frames, take, errors.append)
    left.send(b"x")
    await eventually(lambda: errors)
    assert drain.closed
    left.send(b"y")
    await asyncio.sleep(0.02)
    assert [str(error) for error in errors] == ["no"]
