"""The prober: asks each replica whether it lives, what it serves and where its events are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from cache_index.identity import ModelIdentity
from router.config import KvEventsConfig, Settings
from router.replicas import Fleet, Replica, listed_publishers, served_models, source_specs

logger = logging.getLogger("kvroute.health")

REFRESH_PROBES = 5
"""Models and publishers are asked for again after this many probes."""


class Prober:
    """One task per replica; the fleet's facts are written here."""

    def __init__(
        self, fleet: Fleet, settings: Settings, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._on_change = on_change
        self._client = httpx.AsyncClient(timeout=settings.probe_timeout_s, trust_env=False)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe every replica once, then go on in the background."""
        await asyncio.gather(*(self._probe(each, 0) for each in self._fleet.replicas.values()))
        self._tasks = [
            asyncio.create_task(self._watch(replica)) for replica in self._fleet.replicas.values()
        ]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _watch(self, replica: Replica) -> None:
        count = 1
        while True:
            await asyncio.sleep(self._settings.probe_interval_s)
            await self._probe(replica, count)
            replica.pool.close_idle(self._settings.keepalive_s)
            count += 1

    async def _probe(self, replica: Replica, count: int) -> None:
        was = (replica.healthy, replica.sources, tuple(replica.models))
        try:
            await self._ask(replica, learn=not replica.healthy or count % REFRESH_PROBES == 0)
        except (httpx.HTTPError, ValueError, ValidationError) as error:
            replica.failed(str(error) or type(error).__name__)
        if was != (replica.healthy, replica.sources, tuple(replica.models)):
            state = "healthy" if replica.healthy else f"down: {replica.reason}"
            logger.info("replica %s is %s", replica.name, state)
            self._on_change()

    async def _ask(self, replica: Replica, *, learn: bool) -> None:
        answer = await self._client.get(f"{replica.url}/health")
        if answer.status_code != 200:
            raise ValueError(f"GET /health answered {answer.status_code}")
        if learn:
            await self._learn(replica)
        replica.healthy = True
        replica.reason = ""

    async def _learn(self, replica: Replica) -> None:
        models = served_models(await self._json(replica, "/v1/models"))
        if not models:
            raise ValueError("GET /v1/models lists no model")
        publishers = await self._publishers(replica)
        base = next(iter(models.values())).base
        host = urlsplit(replica.url).hostname or ""
        replica.models = models
        replica.sources = source_specs(replica.name, host, publishers, ModelIdentity(base))
        replica.ranks = tuple(sorted({each.rank for each in publishers})) or (0,)

    async def _publishers(self, replica: Replica) -> list[KvEventsConfig]:
        if replica.declared_events is not None:
            return replica.declared_events
        return listed_publishers(await self._json(replica, "/kv_event_sources", missing={}))

    async def _json(self, replica: Replica, path: str, missing: Any = None) -> Any:
        answer = await self._client.get(replica.url + path)
        if answer.status_code == 404 and missing is not None:
            return missing
        if answer.status_code != 200:
            raise ValueError(f"GET {path} answered {answer.status_code}")
        return answer.json()
