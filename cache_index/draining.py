"""Reads many ZMQ sockets on one event loop, in turns of bounded length.

A future per message costs more than most messages, so a socket is read without waiting whenever it
says that something has come. All sockets share one turn: however much has come, the loop is held
up for `TURN_S` and no longer before it gets to other work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import zmq

__all__ = ["Drain", "Pump", "RawSocket", "read_frames"]

TURN_S = 0.002
_MESSAGES_PER_VISIT = 8
Message = TypeVar("Message")
RawSocket = zmq.Socket[bytes]


class Visited(Protocol):
    """What the pump knows of a drain."""

    queued: bool
    closed: bool

    def visit(self) -> bool:
        """Read a few messages. True if there may be more."""
        ...


class Pump:
    """Gives every socket that has something to read its turn. One for each event loop."""

    def __init__(self) -> None:
        self._ready: deque[Visited] = deque()
        self._running = False

    def ready(self, drain: Visited) -> None:
        """`drain` has something to read."""
        if not drain.queued and not drain.closed:
            drain.queued = True
            self._ready.append(drain)
            self._go_on()

    def _go_on(self) -> None:
        if self._ready and not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        end_s = time.perf_counter() + TURN_S
        while self._ready:
            drain = self._ready.popleft()
            drain.queued = False
            if not drain.closed and drain.visit() and not drain.closed:
                drain.queued = True
                self._ready.append(drain)
            if time.perf_counter() >= end_s:
                break
        self._running = False
        self._go_on()


class Drain(Generic[Message]):
    """Reads one socket until closed. `take` gets messages in order, a few at a time.

    What `take` or the socket raises is given to `failed` and ends the reading.
    """

    def __init__(
        self,
        pump: Pump,
        socket: RawSocket,
        read: Callable[[RawSocket], Message],
        take: Callable[[list[Message]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._pump = pump
        self._socket = socket
        self._read = read
        self._take = take
        self._failed = failed
        self.queued = False
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, pump.ready, self)
        # The descriptor tells of changes; what was there before would wait for the next one.
        pump.ready(self)

    def visit(self) -> bool:
        """Read a few messages. True if there may be more."""
        messages: list[Message] = []
        try:
            while len(messages) < _MESSAGES_PER_VISIT:
                try:
                    messages.append(self._read(self._socket))
                except zmq.Again:
                    break
            if messages:
                self._take(messages)
        except Exception as error:
            self.close()
            self._failed(error)
            return False
        return len(messages) == _MESSAGES_PER_VISIT

    def close(self) -> None:
        """Stop reading. To be called before the socket is closed, which stays the caller's."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)


def read_frames(socket: RawSocket) -> list[bytes]:
    """The next message. Raises zmq.Again when there is none."""
    return socket.recv_multipart(zmq.NOBLOCK)
