"""One bound SUB socket that many publishers dial, told apart by their topics.

A topic is a source's own (as its engine lists it), or carries one of its names: `NAME` alone or
`kv@NAME@MODEL`. What two sources claim goes to neither. Topics that nobody has declared are
counted, and some of them are remembered, so that a typing error can be found.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import zmq

from cache_index.dialed import DialedSource
from cache_index.door import ZAP_DOMAIN, Spoken, read_spoken
from cache_index.draining import Drain, Pump, RawSocket
from cache_index.sockets import (
    SUB_HIGH_WATER_MESSAGES,
    SocketEvent,
    pending_events,
    read_event,
    set_options,
)
from cache_index.types import ListenerStatus, SourceSpec

__all__ = ["Listener", "TopicTable"]

_log = logging.getLogger(__name__)
_BACKOFF_S = (0.2, 5.0)
_MAX_UNKNOWN, _UNKNOWN_CHARS = 32, 120
_MAX_ROUTES = 4096
_PARTS = 3


class TopicTable:
    """Whose a topic is. Pure."""

    def __init__(self, sources: Iterable[tuple[SourceSpec, DialedSource]]) -> None:
        self._topics: dict[str, DialedSource | None] = {}
        self._names: dict[str, DialedSource | None] = {}
        for spec, source in sources:
            if spec.topic:
                self._claim(self._topics, spec.topic, source)
            for name in spec.names:
                self._claim(self._names, name, source)

    @staticmethod
    def _claim(table: dict[str, DialedSource | None], key: str, source: DialedSource) -> None:
        table[key] = source if table.get(key, source) is source else None

    def find(self, topic: str) -> DialedSource | None:
        """The one source that claims it."""
        if topic in self._topics:
            return self._topics[topic]
        parts = topic.split("@", _PARTS - 1)
        named = parts[1] if len(parts) == _PARTS and parts[0] == "kv" else topic
        return self._names.get(named)


class Listener:
    """Binds, listens and hands out, until cancelled."""

    def __init__(self, endpoint: str, context: zmq.Context[RawSocket], pump: Pump) -> None:
        self.endpoint = endpoint
        self._context = context
        self._pump = pump
        self._sources: dict[SourceSpec, DialedSource] = {}
        self._table = TopicTable(())
        self._routes: dict[bytes, DialedSource | None] = {}
        self._unknown: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.bound = False
        self.error = "not bound yet"
        # The connections that are open, by the descriptor that the monitor knows them by.
        self._open: set[int] = set()
        self._of_fd: dict[int, int] = {}
        self._dead: dict[int, None] = {}

    def set_sources(self, sources: Mapping[SourceSpec, DialedSource]) -> None:
        """Hand out to exactly these from now on."""
        self._sources = dict(sources)
        self._table = TopicTable(self._sources.items())
        self._routes.clear()
        for topic in [topic for topic in self._unknown if self._table.find(topic) is not None]:
            del self._unknown[topic]

    def status(self) -> ListenerStatus:
        """What it hears, and what of it belongs to nobody."""
        return ListenerStatus(
            endpoint=self.endpoint,
            bound=self.bound,
            reason=self.error,
            connections=len(self._open),
            topics=sum(source is not None for source in self._routes.values()),
            unknown=dict(self._unknown),
            counts=dict(self.counts),
        )

    async def run(self) -> None:
        """Listen for ever; an address that is taken is tried again."""
        pause_s = _BACKOFF_S[0]
        while True:
            try:
                await self._listen()
            except (zmq.ZMQError, OSError) as error:
                self.error = f"{self.endpoint} cannot be bound: {error}"
                _log.warning("KV events: %s", self.error)
            except Exception:
                self.error = "internal error"
                _log.exception("KV events on %s: it starts over", self.endpoint)
            pause_s = _BACKOFF_S[0] if self.bound else min(pause_s * 2, _BACKOFF_S[1])
            self._unbound()
            await asyncio.sleep(pause_s)

    async def _listen(self) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        socket = self._context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        drains: list[Drain[Spoken] | Drain[SocketEvent]] = []

        def failed(error: Exception) -> None:
            if not ended.done():
                ended.set_exception(error)

        def take(messages: Sequence[Spoken]) -> None:
            # The library tells of a connection before it delivers anything of the next one.
            self._told(pending_events(monitor))
            for spoken in messages:
                self._hand_out(spoken)

        try:
            set_options(socket)
            socket.rcvhwm = SUB_HIGH_WATER_MESSAGES
            socket.zap_domain = ZAP_DOMAIN
            # Everything, so that topics that nobody declared are noticed.
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            drains.append(Drain(self._pump, monitor, read_event, self._told, failed))
            drains.append(Drain(self._pump, socket, read_spoken, take, failed))
            socket.bind(self.endpoint)
            self.bound, self.error = True, ""
            await ended
        finally:
            for drain in drains:
                drain.close()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _unbound(self) -> None:
        self.bound = False
        self._open.clear()
        self._of_fd.clear()
        for source in self._sources.values():
            source.lost_all()

    def _told(self, events: Iterable[SocketEvent] | Iterator[SocketEvent]) -> None:
        for event in events:
            if event.kind == zmq.EVENT_ACCEPTED:
                self.counts["accepted"] += 1
                self._open.add(event.value)
            elif event.kind == zmq.EVENT_DISCONNECTED:
                self.counts["disconnected"] += 1
                self._open.discard(event.value)
                self._closed(self._of_fd.pop(event.value, None))

    def _closed(self, connection: int | None) -> None:
        if connection is None:
            return
        self._dead[connection] = None
        if len(self._dead) > _MAX_ROUTES:
            del self._dead[next(iter(self._dead))]
        for source in self._sources.values():
            source.lost(connection)

    def _hand_out(self, spoken: Spoken) -> None:
        topic = spoken.frames[0]
        source = self._routes.get(topic)
        if source is None:
            source = self._find(topic)
            if source is None:
                return
        source.heard(spoken, alive=self._alive(spoken))

    def _alive(self, spoken: Spoken) -> bool:
        """Whether its connection is still open, as far as the monitor has told."""
        if spoken.connection in self._dead or spoken.fd not in self._open:
            return False
        known = self._of_fd.setdefault(spoken.fd, spoken.connection)
        if known < spoken.connection:
            # The descriptor was used again, by a connection that has not spoken before.
            self._of_fd[spoken.fd] = spoken.connection
            self._closed(known)
        return known <= spoken.connection

    def _find(self, topic: bytes) -> DialedSource | None:
        text = topic[: 4 * _UNKNOWN_CHARS].decode("utf-8", "backslashreplace")
        source = self._table.find(text)
        if source is None:
            self.counts["unknown_topic"] += 1
            shown = text[:_UNKNOWN_CHARS]
            if shown in self._unknown or len(self._unknown) < _MAX_UNKNOWN:
                if shown not in self._unknown:
                    _log.warning("KV events on %s under an unknown topic: %r", self.endpoint, shown)
                self._unknown[shown] += 1
        elif len(self._routes) < _MAX_ROUTES:
            self._routes[topic] = source
        return source
