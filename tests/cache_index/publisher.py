"""A publisher of KV events on real sockets, as faithful to vLLM's as the index can notice."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cache_index import ModelIdentity, SourceSpec

MODEL = ModelIdentity("sim-model")
END = struct.pack(">q", -1)


def stored(
    hashes: Sequence[Any],
    tokens: Sequence[int],
    *,
    parent: Any = None,
    block_size: int = 16,
    medium: str | None = "GPU",
    **more: Any,
) -> dict[str, Any]:
    """A BlockStored in the map encoding."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(hashes: Sequence[Any], *, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """A BlockRemoved in the map encoding."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The same event in the older encoding."""
    return list(event.values())


def encode(events: Iterable[Any], timestamp_s: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([timestamp_s, list(events), 0])


class Publisher:
    """One engine process: PUB, and ROUTER for replay unless `replay` is False.

    With `dial` the PUB connects there instead of binding.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        replay_port: int = 0,
        replay: bool = True,
        with_topic: bool = True,
        buffer_steps: int = 10_000,
        topic: str = "",
        dial: str | None = None,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self.topic = topic
        self._with_topic = with_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.seq = 0
        self.replays = 0
        self.answering = True
        self._pub = self._context.socket(zmq.XPUB)
        self.dials = dial
        if dial is None:
            self.port = _bind(self._pub, port)
        else:
            self._pub.linger = 0
            self._pub.connect(dial)
        self.replay_port: int | None = None
        self._task: asyncio.Task[None] | None = None
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_port = _bind(self._router, replay_port)
            self._task = asyncio.create_task(self._serve())

    def spec(self, replica: str = "r0", rank: int = 0) -> SourceSpec:
        replay = self.replay_port
        return SourceSpec(
            replica=replica,
            rank=rank,
            endpoint=self.dials or f"tcp://127.0.0.1:{self.port}",
            replay_endpoint=None if replay is None else f"tcp://127.0.0.1:{replay}",
            topic=self.topic,
            model=MODEL,
            dials=self.dials is not None,
        )

    async def subscribed(self) -> None:
        """Wait until a subscriber's subscription has arrived."""
        async with asyncio.timeout(5):
            await self._pub.recv()

    async def publish(self, *events: Any, lost: bool = False) -> int:
        """Publish one batch; a `lost` one is only in the replay buffer."""
        payload = encode(events)
        seq, self.seq = self.seq, self.seq + 1
        self._buffer.append((seq, payload))
        if not lost:
            await self._pub.send_multipart([self.topic.encode(), struct.pack(">Q", seq), payload])
        return seq

    async def send_raw(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            if not self.answering:
                continue
            self.replays += 1
            topic = [self.topic.encode()] if self._with_topic else []
            for seq, payload in list(self._buffer):
                if seq >= int.from_bytes(start, "big"):
                    await self._router.send_multipart(
                        [client, b"", *topic, struct.pack(">Q", seq), payload]
                    )
            end_topic = [b""] if self._with_topic else []
            await self._router.send_multipart([client, b"", *end_topic, END, b""])

    async def close(self) -> None:
        """The process is gone."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    socket.linger = 0
    if port:
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port
    return int(socket.bind_to_random_port("tcp://127.0.0.1"))
