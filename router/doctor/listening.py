"""Listens to a replica's publishers for a short time: who can be reached, and what is said.

Sockets of the doctor's own, so that the index hears nothing of it; every wait has a deadline and
what is kept is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from cache_index.errors import MalformedBatch
from cache_index.events import END_FRAME, SEQ_BYTES, EventBatch, decode_batch
from cache_index.tasks import end
from cache_index.types import SourceSpec
from router.doctor.facts import Publisher

MAX_KEPT_MESSAGES = 2000
MAX_PUBLISHERS = 64
SETTLE_S = 0.15
"""A subscription takes effect some time after the connection stands."""
PAST_EVERYTHING = (1 << 62).to_bytes(SEQ_BYTES, "big")
"""A replay from here brings nothing but its end."""

Context = zmq.asyncio.Context


@dataclass(frozen=True, slots=True)
class Message:
    """One message: whose publisher brought it, when by our clock, and what it says."""

    rank: int
    topic: str
    at_s: float
    batch: EventBatch


@dataclass(slots=True)
class Ears:
    """What was heard since listening began."""

    publishers: tuple[Publisher, ...] = ()
    messages: deque[Message] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_MESSAGES))
    unreadable: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, rank: int, frames: Sequence[bytes]) -> None:
        """Keep one message, or count that it could not be read."""
        try:
            if len(frames) != 3:
                raise MalformedBatch("frames")
            batch = decode_batch(frames[2])
        except MalformedBatch:
            self.unreadable += 1
            return
        self.unreadable += batch.malformed
        self.messages.append(
            Message(rank, frames[0].decode("utf-8", "replace"), time.time(), batch)
        )
        self.news.set()


@contextlib.asynccontextmanager
async def listening(specs: Sequence[SourceSpec], limit_s: float) -> AsyncIterator[Ears]:
    """Connect to each publisher and its replay within `limit_s`, and hear what comes."""
    ears = Ears()
    context = Context()
    tasks: list[asyncio.Task[None]] = []
    try:
        with contextlib.ExitStack() as stack:
            wanted = specs[:MAX_PUBLISHERS]
            ears.publishers = tuple(
                await asyncio.gather(
                    *(_open(context, stack, spec, ears, tasks, limit_s) for spec in wanted)
                )
            )
            if any(each.connected for each in ears.publishers):
                await asyncio.sleep(SETTLE_S)
            try:
                yield ears
            finally:
                await end(*tasks)
    finally:
        context.destroy(linger=0)


async def _open(
    context: Context,
    stack: contextlib.ExitStack,
    spec: SourceSpec,
    ears: Ears,
    tasks: list[asyncio.Task[None]],
    limit_s: float,
) -> Publisher:
    socket = context.socket(zmq.SUB)
    stack.callback(socket.close, 0)
    # Everything, so that a topic that differs from the declared one is heard too.
    socket.subscribe(b"")
    reach = _never() if spec.dials else _connect(socket, stack, spec.endpoint, limit_s)
    connected, replays = await asyncio.gather(reach, _replays(context, spec, limit_s))
    if connected:
        tasks.append(asyncio.create_task(_receive(socket, spec.rank, ears)))
    return Publisher(
        rank=spec.rank,
        endpoint=spec.endpoint,
        replay_endpoint=spec.replay_endpoint,
        topic=spec.topic,
        connected=connected,
        replays=replays,
        dials=spec.dials,
    )


async def _never() -> bool:
    return False


async def _connect(
    socket: zmq.asyncio.Socket, stack: contextlib.ExitStack, endpoint: str, limit_s: float
) -> bool:
    """Whether a publisher answers there: a handshake of ZMQ, not of TCP alone."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stack.callback(monitor.close, 0)
    stack.callback(socket.disable_monitor)
    try:
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(endpoint)
        async with asyncio.timeout(limit_s):
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return True
    except (TimeoutError, zmq.ZMQError):
        return False


async def _replays(context: Context, spec: SourceSpec, limit_s: float) -> bool:
    """Whether the replay endpoint answers, in either framing."""
    if spec.replay_endpoint is None:
        return False
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(spec.replay_endpoint)
        async with asyncio.timeout(limit_s):
            await dealer.send_multipart([b"", PAST_EVERYTHING])
            while True:
                frames = await dealer.recv_multipart()
                if END_FRAME in frames[-2:]:
                    return True
                await asyncio.sleep(0)  # as below; the deadline would not be seen either
    except (TimeoutError, zmq.ZMQError):
        return False
    finally:
        dealer.close(0)


async def _receive(socket: zmq.asyncio.Socket, rank: int, ears: Ears) -> None:
    while True:
        ears.take(rank, await socket.recv_multipart())
        await asyncio.sleep(0)  # what is there is had without waiting: others want their turn
