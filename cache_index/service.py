"""The index as the gateway sees it: declare sources, ask for matches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from prometheus_client import CollectorRegistry

from cache_index.embedded import EmbeddedServer
from cache_index.errors import EmbeddedServerError
from cache_index.flights import Flights
from cache_index.indexer import Indexer
from cache_index.metrics import IndexCollector
from cache_index.mirror import Mirror
from cache_index.redis_index import RedisIndex
from cache_index.tasks import end
from cache_index.types import Holder, ListenerStatus, SourceKey, SourceSpec, SourceStatus, Trust

__all__ = ["CacheIndex"]

_log = logging.getLogger(__name__)
_DEFAULT_MAX_UNITS = 4_000_000
_WATCH_S = 0.25
_TRUSTS_S = 0.25
_RESTART_PAUSE_S = 2.0


class CacheIndex:
    """Follows KV event publishers and answers which holder has how much of a prompt.

    With `redis_url` None a private Valkey server is started. `mirror_max_units` bounds both the
    copy in this process and what is written to Redis: past it new units are refused, which
    under-reports. A copy older than `mirror_max_lag_s` answers nothing. Gateways that share a
    Redis share an index if `namespace` and `base_unit_tokens` are the same; a gateway that dies is
    replaced as writer after `writer_lease_s`, by default a part of the trust lease, so that what a
    dead writer left is not believed for longer than that. `listen` is an address to bind for
    publishers that dial, whether any is declared or not. In `flights` the caller puts the prompts
    it has sent to ranks, and is told how far they are. Nothing here raises because Redis or a
    publisher is gone.
    """

    def __init__(
        self,
        *,
        redis_url: str | None,
        base_unit_tokens: int = 16,
        registry: CollectorRegistry,
        mirror_max_units: int = _DEFAULT_MAX_UNITS,
        trust_lease_s: float = 5.0,
        mirror_max_lag_s: float = 0.1,
        writer_lease_s: float | None = None,
        namespace: str = "kvroute",
        listen: str | None = None,
    ) -> None:
        self._redis_url = redis_url
        self._base_unit_tokens = base_unit_tokens
        self._registry = registry
        self._max_units = mirror_max_units
        self._trust_lease_s = trust_lease_s
        self._max_lag_s = mirror_max_lag_s
        self._writer_lease_s = writer_lease_s
        self._namespace = namespace
        self._listen = listen
        self.flights = Flights()
        self._matches: Counter[str] = Counter()
        self._embedded: EmbeddedServer | None = None
        self._redis: RedisIndex | None = None
        self._indexer: Indexer | None = None
        self._mirror: Mirror | None = None
        self._collector: IndexCollector | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._specs: Collection[SourceSpec] = ()
        self._trusts: Mapping[tuple[str, int], str] = {}
        self._trusts_until_s = 0.0

    async def start(self) -> None:
        """Start everything. A server that cannot be reached is waited for in the background."""
        url = self._redis_url
        if url is None:
            self._embedded = EmbeddedServer()
            await self._ensure_embedded()
            url = self._embedded.url
            self._tasks.append(asyncio.create_task(self._watch_embedded()))
        self._redis = RedisIndex(
            url,
            base_unit_tokens=self._base_unit_tokens,
            max_units=self._max_units,
            namespace=self._namespace,
        )
        self._mirror = Mirror(self._redis, max_units=self._max_units, max_lag_s=self._max_lag_s)
        self._indexer = Indexer(
            self._redis,
            base_unit_tokens=self._base_unit_tokens,
            trust_lease_s=self._trust_lease_s,
            writer_lease_s=self._writer_lease_s,
            listen=self._listen,
            flights=self.flights,
        )
        self._indexer.set_sources(self._specs)
        self._collector = IndexCollector(
            self._indexer, self._mirror, self._matches, lambda: self.available
        )
        self._registry.register(self._collector)
        self._tasks.append(asyncio.create_task(self._mirror.run()))
        self._indexer.start()

    async def close(self) -> None:
        """Stop everything; no task, process, socket or folder is left. Idempotent."""
        if self._collector is not None:
            self._registry.unregister(self._collector)
            self._collector = None
        tasks, self._tasks = self._tasks, []
        await end(*tasks)
        if self._indexer is not None:
            await self._indexer.close()
            self._indexer = None
        if self._redis is not None:
            await self._redis.close()
            self._redis = None
        if self._embedded is not None:
            await self._embedded.close()
            self._embedded = None

    def set_sources(self, specs: Collection[SourceSpec]) -> None:
        """Follow exactly these sources from now on. Idempotent; may be called before `start`."""
        self._specs = tuple(specs)
        if self._indexer is not None:
            self._indexer.set_sources(self._specs)

    def match(self, root: int, hashes: Sequence[int] | bytes) -> dict[Holder, int]:
        """Leading base units per holder, in whole units of that holder.

        `hashes` is the chain that starts from `root`, as integers or packed. Synchronous and in
        memory. Holders whose source is not trusted at all are left out; without Redis, or while the
        mirror lags, the answer is empty.
        """
        # A chain's first hash already depends on its root, so no entry of another root can match.
        if self._mirror is None or self._indexer is None or not self._mirror.current:
            self._matches["unavailable"] += 1
            return {}
        now_s = time.monotonic()
        trusted = {
            holder: units
            for holder, units in self._mirror.match(hashes).items()
            if self._indexer.trust(SourceKey(holder.replica, holder.rank), now_s) is not Trust.NONE
        }
        self._matches["hit" if trusted else "miss"] += 1
        return trusted

    def sources(self) -> list[SourceStatus]:
        """What is known about every declared source."""
        return [] if self._indexer is None else self._indexer.statuses()

    def listeners(self) -> list[ListenerStatus]:
        """The bound sockets that publishers dial."""
        return [] if self._indexer is None else self._indexer.listeners()

    def void(self, replica: str, reason: str) -> None:
        """Forget what a replica's own cache holds, for it is known to have been emptied.

        An engine that is put to sleep, for one, tells so with its first step after waking.
        """
        if self._indexer is not None:
            self._indexer.void(replica, reason)

    def trusts(self) -> Mapping[tuple[str, int], str]:
        """How far each source is trusted, at most a quarter of a second ago.

        What is given out is never changed, so that whoever keeps it keeps what was known then.
        """
        now_s = time.monotonic()
        if self._indexer is not None and now_s >= self._trusts_until_s:
            self._trusts = {
                (key.replica, key.rank): str(runner.state.trust(now_s)[0])
                for key, runner in self._indexer.runners.items()
            }
            self._trusts_until_s = now_s + _TRUSTS_S
        return self._trusts

    @property
    def available(self) -> bool:
        """Redis answers and the mirror is current."""
        return self._mirror is not None and self._mirror.current

    @property
    def redis_url(self) -> str | None:
        """The server in use, once started: another process may share it."""
        return self._redis_url if self._embedded is None else self._embedded.url

    async def _ensure_embedded(self) -> None:
        if self._embedded is not None:
            try:
                await self._embedded.ensure()
            except EmbeddedServerError as error:
                _log.warning("%s; trying again", error)
                await asyncio.sleep(_RESTART_PAUSE_S)

    async def _watch_embedded(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            with contextlib.suppress(OSError):
                await self._ensure_embedded()
