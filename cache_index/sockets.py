"""How the index's ZMQ sockets are set up, and what their monitors say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from cache_index.draining import RawSocket
from cache_index.types import SourceKey

__all__ = [
    "SUB_HIGH_WATER_MESSAGES",
    "SocketEvent",
    "pending_events",
    "read_event",
    "set_options",
    "told_trouble",
]

_log = logging.getLogger(__name__)

SUB_HIGH_WATER_MESSAGES = 20_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 3000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 2000


class SocketEvent(NamedTuple):
    """What happened to a connection, and its file descriptor where the kind of event has one."""

    kind: int
    value: int


def set_options(socket: RawSocket | zmq.asyncio.Socket) -> None:
    """Heartbeats find peers that vanished without a word; nothing lingers at the end."""
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.IPV6, 1)


def read_event(monitor: RawSocket) -> SocketEvent:
    """The next thing that a monitor tells. Raises zmq.Again when there is none."""
    told = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
    return SocketEvent(int(told["event"]), told["value"])


def pending_events(monitor: RawSocket) -> Iterator[SocketEvent]:
    """All that a monitor has to tell now."""
    while True:
        try:
            yield read_event(monitor)
        except zmq.Again:
            return


def told_trouble(key: SourceKey, endpoint: str | None, error: Exception) -> str:
    """Log what ended the following of a source; the reason in short."""
    if isinstance(error, zmq.ZMQError | OSError):
        reason = f"{endpoint}: {error}"
        _log.warning("source %s/%d: %s", *key, reason)
        return reason
    _log.error("source %s/%d: it starts over", *key, exc_info=error)
    return "internal error"
