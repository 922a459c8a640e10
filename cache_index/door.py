"""Gives every connection to a bound socket a number, which each of its messages then carries.

A bound SUB cannot tell its peers apart by itself: its monitor knows file descriptors, its messages
know topics. The library asks whoever is bound to ZAP's address (RFC 27) about each new connection;
here everybody is let in, under a user id that was never given before.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from cache_index.draining import Drain, Pump, RawSocket, read_frames

__all__ = ["ZAP_DOMAIN", "Door", "Spoken", "read_spoken"]

ZAP_DOMAIN = b"kv-events"
_ADDRESS = "inproc://zeromq.zap.01"
_REQUEST_FRAMES = 8


class Spoken:
    """One message and the connection that it came over. `fd` is -1 where the library has none."""

    __slots__ = ("connection", "fd", "frames", "peer")

    def __init__(self, frames: list[bytes], connection: int, fd: int, peer: str) -> None:
        self.frames = frames
        self.connection = connection
        self.fd = fd
        self.peer = peer


def read_spoken(socket: RawSocket) -> Spoken:
    """The next message of a bound socket. Raises zmq.Again when there is none."""
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    last = frames[-1]
    return Spoken(
        [frame.bytes for frame in frames],
        int(_property(last, "User-Id") or 0),
        int(_property(last, "__fd") or -1),
        _property(last, "Peer-Address"),
    )


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


class Door:
    """The ZAP handler of one context. To be opened before any socket is bound with its domain."""

    def __init__(self, context: zmq.Context[RawSocket], pump: Pump) -> None:
        self.connections = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._drain = Drain(pump, self._socket, read_frames, self._answer, self._failed)
        self.error: Exception | None = None

    def _answer(self, requests: Sequence[list[bytes]]) -> None:
        for request in requests:
            if len(request) < _REQUEST_FRAMES:
                continue
            self.connections += 1
            asker, _, version, number = request[:4]
            user = str(self.connections).encode()
            self._socket.send_multipart(
                (asker, b"", version, number, b"200", b"OK", user, b""), zmq.NOBLOCK
            )

    def _failed(self, error: Exception) -> None:
        self.error = error

    def close(self) -> None:
        """Nobody is let in any more."""
        self._drain.close()
        self._socket.close(linger=0)
