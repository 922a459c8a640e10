"""The ZMQ side of one rank's KV events: a PUB socket, and a ROUTER that replays.

Sequence numbers start at 0 with every life of the publisher. The last `buffer_steps` batches
can be asked for again, in the framing of vLLM before 0.26 (`old`) or since (`new`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio

_END = (-1).to_bytes(8, "big", signed=True)
PUB_HWM_MESSAGES = 100_000
_SEQ_BYTES = 8
_REPLAY_BURST = 50


class ReplayFraming(StrEnum):
    """Frames of a replay answer: without (`old`) or with (`new`) the topic."""

    OLD = "old"
    NEW = "new"


class SourceAddress(NamedTuple):
    """Where one rank publishes: ZMQ endpoints a subscriber can connect to, and the topic."""

    endpoint: str
    replay_endpoint: str
    topic: str
    buffer_steps: int
    bound: bool = True


class Publisher(Protocol):
    """Where the events of one rank go; `address` is None where they go nowhere."""

    @property
    def address(self) -> SourceAddress | None: ...
    def start(self) -> None: ...
    def publish(self, payload: bytes) -> None: ...
    async def close(self) -> None: ...


class NoPublisher:
    """Events are off."""

    address: SourceAddress | None = None

    def start(self) -> None:
        """Nothing to do."""

    def publish(self, payload: bytes) -> None:
        """Nobody is told."""

    async def close(self) -> None:
        """Nothing to free."""


class KVPublisher:
    """Publishes encoded batches of one rank. Use `start` and `close` from a running loop.

    With `bind=False` it dials `host` and `port` instead of listening there.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        framing: ReplayFraming = ReplayFraming.NEW,
        buffer_steps: int = 10_000,
        bind: bool = True,
    ) -> None:
        self._topic = topic.encode()
        self._framing = framing
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next_seq = 0
        self._task: asyncio.Task[None] | None = None
        self._pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._router = zmq.asyncio.Socket(context, zmq.ROUTER)
        self._pub.set_hwm(PUB_HWM_MESSAGES)
        # A replay answer may exceed the default mark, and ROUTER drops what is above it.
        self._router.set(zmq.SNDHWM, 0)
        try:
            endpoint = (_bind if bind else _dial)(self._pub, host, port)
            replay_endpoint = _bind(self._router, host, replay_port)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self.address: SourceAddress | None = SourceAddress(
            endpoint, replay_endpoint, topic, buffer_steps, bind
        )

    def start(self) -> None:
        """Begin to answer replay requests."""
        self._task = asyncio.create_task(self._serve_replays())

    def publish(self, payload: bytes) -> None:
        """Send one batch; never waits, slow subscribers lose batches as with vLLM."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._buffer.append((seq, payload))
        self._pub.send_multipart((self._topic, _seq_frame(seq), payload), zmq.NOBLOCK)

    async def close(self) -> None:
        """Stop answering and free the ports."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == _SEQ_BYTES:
                await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, client: bytes, start: int) -> None:
        # A copy: batches published while this one is being sent belong to the live stream.
        wanted = [entry for entry in self._buffer if entry[0] >= start]
        for place, (seq, payload) in enumerate(wanted):
            await self._answer(client, _seq_frame(seq), payload, self._topic)
            # Sending does not wait by itself, and engines share this loop.
            if place % _REPLAY_BURST == 0:
                await asyncio.sleep(0)
        await self._answer(client, _END, b"", b"")

    async def _answer(self, client: bytes, seq: bytes, payload: bytes, topic: bytes) -> None:
        head = (client, b"") if self._framing is ReplayFraming.OLD else (client, b"", topic)
        await self._router.send_multipart((*head, seq, payload))


def _seq_frame(seq: int) -> bytes:
    return seq.to_bytes(_SEQ_BYTES, "big")


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _dial(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    endpoint = f"tcp://{host}:{port}"
    socket.connect(endpoint)
    return endpoint
