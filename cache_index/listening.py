"""The bound sockets of this process: one per address that some source's publisher dials."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import zmq

from cache_index.door import Door
from cache_index.draining import Pump, RawSocket
from cache_index.listener import Listener
from cache_index.runner import SourceRunner
from cache_index.tasks import end
from cache_index.types import ListenerStatus, SourceSpec

__all__ = ["Listening"]


class Listening:
    """Binds what is needed and hands each source to its listener.

    `always` is bound even while no source needs it, so that engines which dial it too early, or
    under a topic that nobody declared, are noticed.
    """

    def __init__(self, context: zmq.Context[RawSocket], pump: Pump, always: str | None) -> None:
        self._context = context
        self._pump = pump
        self._always = always
        self._door: Door | None = None
        self._running: dict[str, tuple[Listener, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def set_sources(self, runners: Iterable[SourceRunner]) -> None:
        """Follow exactly those of these that dial."""
        wanted: dict[str, dict[SourceSpec, SourceRunner]] = {}
        if self._always:
            wanted[self._always] = {}
        for runner in runners:
            if runner.spec.dials and runner.spec.endpoint:
                wanted.setdefault(runner.spec.endpoint, {})[runner.spec] = runner
        for endpoint in self._running.keys() - wanted.keys():
            self._stop(endpoint)
        for endpoint, of_it in wanted.items():
            self._listener(endpoint).set_sources(
                {spec: each.dialed for spec, each in of_it.items() if each.dialed is not None}
            )

    def reason(self, spec: SourceSpec) -> str:
        """Why nothing of this source can be heard; empty if it can, or if it does not dial."""
        found = self._running.get(spec.endpoint) if spec.dials else None
        return found[0].error if found is not None else ""

    def statuses(self) -> list[ListenerStatus]:
        """Every bound socket."""
        return [listener.status() for listener, _ in self._running.values()]

    def _listener(self, endpoint: str) -> Listener:
        found = self._running.get(endpoint)
        if found is None:
            if self._door is None:
                self._door = Door(self._context, self._pump)
            listener = Listener(endpoint, self._context, self._pump)
            found = self._running[endpoint] = (listener, asyncio.create_task(listener.run()))
        return found[0]

    def _stop(self, endpoint: str) -> None:
        _, task = self._running.pop(endpoint)
        ending = asyncio.create_task(end(task))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Bind nothing any more. Idempotent."""
        for endpoint in list(self._running):
            self._stop(endpoint)
        await asyncio.gather(*self._ending)
        if self._door is not None:
            self._door.close()
            self._door = None
