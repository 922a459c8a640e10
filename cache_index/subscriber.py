"""Follows one source over a SUB socket that connects to its publisher.

A socket serves for one connection. A publisher that restarts quickly can look like one that merely
skipped some batches, so what comes after a disconnect must never pass for a continuation: when the
monitor tells of one, the socket is closed with whatever it still holds, and another is opened. The
monitor is asked before anything that was read is taken, because the library has always told of the
disconnect before it delivers what came over the next connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import zmq

from cache_index.draining import Drain, Pump, RawSocket, read_frames
from cache_index.intake import Intake
from cache_index.ledger import Operation
from cache_index.replaying import Replayer
from cache_index.sockets import (
    SUB_HIGH_WATER_MESSAGES,
    SocketEvent,
    pending_events,
    read_event,
    set_options,
    told_trouble,
)
from cache_index.source import SourceState
from cache_index.tasks import for_ever
from cache_index.types import SourceSpec

__all__ = ["Subscriber"]

_REOPEN_S = (0.05, 2.0)


class Subscriber:
    """Feeds a SourceState from its publisher until cancelled."""

    def __init__(
        self,
        spec: SourceSpec,
        state: SourceState,
        context: zmq.Context[RawSocket],
        pump: Pump,
        take: Callable[[Sequence[Operation]], None],
        *,
        lease_s: float,
    ) -> None:
        self._spec = spec
        self._context = context
        self._pump = pump
        self.intake = Intake(state, take)
        self._replayer = Replayer(spec.replay_endpoint, self.intake, context, lease_s)
        self.error = ""

    async def run(self) -> None:
        """Follow the source for ever; sockets that fail are opened again."""
        await for_ever(self._follow, self._failed)

    def _failed(self, error: Exception) -> None:
        self.error = told_trouble(self._spec.key, self._spec.endpoint, error)
        self.intake.state.disconnected()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replayer.run())
            pause_s = _REOPEN_S[0]
            while True:
                pause_s = _REOPEN_S[0] if await self._connection() else pause_s
                self.intake.state.disconnected()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _REOPEN_S[1])

    async def _connection(self) -> bool:
        """One socket, until its connection has come and gone. Raises what goes wrong with it.

        False if its peer turned out to be no publisher.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        socket = self._context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        drains: list[Drain[list[bytes]] | Drain[SocketEvent]] = []
        try:
            set_options(socket)
            socket.rcvhwm = SUB_HIGH_WATER_MESSAGES
            socket.setsockopt(zmq.SUBSCRIBE, self._spec.topic.encode())
            line = _Line(self.intake, monitor, ended, self._heard)
            drains.append(Drain(self._pump, monitor, read_event, line.told, line.failed))
            drains.append(Drain(self._pump, socket, read_frames, line.take, line.failed))
            socket.connect(self._spec.endpoint)
            await ended
            return line.connected
        finally:
            for drain in drains:
                drain.close()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _heard(self) -> None:
        self.error = ""


class _Line:
    """What one socket and its monitor have to say."""

    def __init__(
        self,
        intake: Intake,
        monitor: RawSocket,
        ended: asyncio.Future[None],
        heard: Callable[[], None],
    ) -> None:
        self._intake = intake
        self._monitor = monitor
        self._ended = ended
        self._heard = heard
        self.connected = False

    def told(self, events: Iterable[SocketEvent]) -> None:
        """Of the monitor."""
        for event in events:
            if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._ended.done():
                self.connected = True
                self._heard()
                self._intake.connected()
            elif event.kind == zmq.EVENT_DISCONNECTED and not self._ended.done():
                self._ended.set_result(None)

    def take(self, messages: Sequence[list[bytes]]) -> None:
        """What was read, unless the connection has ended since: it may be the next life's."""
        self.told(pending_events(self._monitor))
        for frames in messages:
            if not self._ended.done():
                self._intake.live(frames)

    def failed(self, error: Exception) -> None:
        """Of the drains."""
        if not self._ended.done():
            self._ended.set_exception(error)
