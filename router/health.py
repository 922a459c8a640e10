"""The prober: asks each replica whether it lives, what it serves and where its events are.

One task per replica, which comes and goes with it. A replica that is down is asked each
`DOWN_INTERVAL_S`, so that it is used again within two seconds of its return. One that says nothing
while requests wait for it is asked out of turn, with less patience, so that one that hangs is found
out in three seconds and not in seven; unless it speaks to somebody meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from random import Random

from cache_index.identity import ModelIdentity
from cache_index.types import SourceSpec
from router.breaker import State
from router.config import KvEventsConfig, Settings
from router.engines import (
    EngineKind,
    EngineLoad,
    engine_kind,
    engine_load,
    is_sglang,
    is_sleeping,
    listed_publishers,
    served_models,
    sglang_publishers,
)
from router.errors import UpstreamError
from router.probe import ProbeFailed, ask, ask_json, ask_optional, refusal
from router.publishers import Bound, source_specs
from router.replicas import Fleet, Replica

logger = logging.getLogger("kvroute.health")

REFRESH_PROBES = 5
"""Models, publishers and gauges are asked for again after this many probes."""
DOWN_INTERVAL_S = 0.75
JITTER = 0.25
JUDGE_INTERVAL_S = 1.0
MAX_PROBES = 128
DOUBT = 0.5
"""Of `probe_timeout_s`, for a replica that has been silent for some time already."""
MISSED_PROBES = 2
"""A busy engine may be late once; refused connections and answers other than 200 count at once."""


class Prober:
    """Keeps the fleet's facts.

    `on_sources` is called when the KV event publishers change, `on_emptied` with the name of a
    replica whose engine falls asleep, and again when it wakes: its cache is gone, which its events
    tell with its next step only. Whoever started meanwhile has replayed what was before.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        on_sources: Callable[[], None] = lambda: None,
        on_emptied: Callable[[str], None] = lambda name: None,
        random: Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._on_sources = on_sources
        self._on_emptied = on_emptied
        self._random = random or Random()
        self._declared: list[SourceSpec] = []
        self._limit_s = settings.probe_timeout_s
        self._bound = Bound(settings.kv_events_bind)
        self._slots = asyncio.Semaphore(MAX_PROBES)
        self._watches: dict[Replica, _Watch] = {}
        self._judge: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Probe every replica once, then go on in the background, with those that join too."""
        for replica in self._fleet.replicas.values():
            self._watch(replica)
        await asyncio.gather(*(self._probe(*each) for each in self._watches.items()))
        self._fleet.on_added.append(self._join)
        self._fleet.on_removed.append(self._leave)
        self._fleet.on_opened.append(self._hurry)
        for replica, watch in self._watches.items():
            watch.task = asyncio.create_task(self._follow(replica, watch))
        self._judge = asyncio.create_task(self._judge_forever())

    async def close(self) -> None:
        """Stop probing."""
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        tasks += [self._judge] if self._judge is not None else []
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # As the fleet changes

    def _watch(self, replica: Replica) -> _Watch:
        watch = self._watches[replica] = _Watch()
        replica.doubt = watch.doubt
        return watch

    def _join(self, replica: Replica) -> None:
        replica.newcomer = True
        watch = self._watch(replica)
        watch.soon.set()
        watch.task = asyncio.create_task(self._follow(replica, watch))

    def _leave(self, replica: Replica) -> None:
        watch = self._watches.pop(replica, None)
        if watch is not None and watch.task is not None:
            watch.task.cancel()
        self._declare()

    def _hurry(self, replica: Replica) -> None:
        watch = self._watches.get(replica)
        if watch is not None:
            watch.soon.set()

    def _declare(self) -> None:
        specs = self._fleet.source_specs()
        if specs != self._declared:
            self._declared = specs
            self._on_sources()

    # Probing

    async def _follow(self, replica: Replica, watch: _Watch) -> None:
        now_s = asyncio.get_running_loop().time
        due_s = now_s() + self._pause_s(replica, watch)
        while True:
            try:
                async with asyncio.timeout_at(due_s):
                    await watch.soon.wait()
            except TimeoutError:
                pass
            watch.soon.clear()
            # However often it is doubted, the whole of its questions comes when it is due.
            doubted = watch.doubted and replica.ready and now_s() < due_s
            watch.doubted = False
            await self._probe(replica, watch, doubted=doubted)
            next_s = now_s() + self._pause_s(replica, watch)
            due_s = min(due_s, next_s) if doubted else next_s
            replica.pool.close_idle(self._settings.keepalive_s)

    def _pause_s(self, replica: Replica, watch: _Watch) -> float:
        interval_s = self._settings.probe_interval_s
        well = replica.ready and not replica.sleeping and replica.breaker.state is not State.OPEN
        if not well or watch.missed:
            interval_s = min(interval_s, DOWN_INTERVAL_S)
        return interval_s * self._random.uniform(1 - JITTER, 1 + JITTER)

    async def _probe(self, replica: Replica, watch: _Watch, *, doubted: bool = False) -> None:
        was, sources, heard = replica.state, replica.sources, replica.pool.heard
        try:
            async with self._slots:
                if doubted:
                    await self._ask_health(replica, self._limit_s * DOUBT)
                else:
                    await self._ask(replica, watch)
            watch.missed = 0
        except TimeoutError:
            if not doubted or replica.pool.heard == heard:
                watch.missed += 1
            if watch.missed >= MISSED_PROBES or not replica.ready:
                replica.failed("it did not answer a probe in time (probe_timeout_s)")
        except (ProbeFailed, UpstreamError) as error:
            replica.failed(str(error) or type(error).__name__)
        except Exception as error:
            logger.exception("probing replica %s failed", replica.name)
            replica.failed(f"probing it failed: {type(error).__name__}")
        if replica.sources != sources:
            self._declare()
        reason = "" if replica.healthy else replica.explanation()
        if replica.state != was or reason != watch.told:
            watch.told = reason
            level = logging.INFO if replica.healthy else logging.WARNING
            logger.log(level, "replica %s: %s", replica.name, f"{replica.state} {reason}".rstrip())

    @staticmethod
    async def _ask_health(replica: Replica, limit_s: float) -> None:
        answer = await ask(replica, "/health", limit_s)
        if answer.status != 200:
            raise refusal(replica, "/health", answer.status)

    async def _ask(self, replica: Replica, watch: _Watch) -> None:
        await self._ask_health(replica, self._limit_s)
        learn = not replica.ready or not replica.models or watch.count % REFRESH_PROBES == 0
        watch.count += 1
        if learn:
            await self._learn(replica, watch)
        sleeping = await self._sleeping(replica, watch, learn=learn)
        if sleeping != replica.sleeping:
            self._on_emptied(replica.name)
        replica.passed(sleeping=sleeping)

    async def _learn(self, replica: Replica, watch: _Watch) -> None:
        models = served_models(await ask_json(replica, "/v1/models", self._limit_s))
        if not models:
            raise ProbeFailed("GET /v1/models lists no model")
        replica.kind = engine_kind(models.values())
        sources, ranks = replica.sources, replica.ranks
        try:
            publishers = await self._publishers(replica)
        except (TimeoutError, ProbeFailed, UpstreamError) as error:
            # It serves all the same: what was known of its events stands.
            logger.warning("replica %s: its KV event publishers: %s", replica.name, error)
        else:
            identity = ModelIdentity(next(iter(models.values())).base)
            declared = replica.declared_events is not None
            sources = source_specs(
                replica.owner, publishers, identity, self._bound, declared=declared
            )
            ranks = tuple(sorted({each.rank for each in publishers})) or (0,)
        replica.learned(models, sources, ranks)
        watch.dev_mode = await ask_optional(replica, "/is_sleeping", self._limit_s) is not None

    async def _publishers(self, replica: Replica) -> list[KvEventsConfig]:
        if replica.declared_events is not None:
            return replica.declared_events
        listed = await ask_optional(replica, "/kv_event_sources", self._limit_s)
        if listed is not None:
            return listed_publishers(listed)
        if replica.kind is EngineKind.VLLM:
            return self._unlisted
        for path in ("/server_info", "/get_server_info"):
            info = await ask_optional(replica, path, self._limit_s)
            if is_sglang(info):
                replica.kind = EngineKind.SGLANG
                return sglang_publishers(info)
        return self._unlisted

    @property
    def _unlisted(self) -> list[KvEventsConfig]:
        """Engines that do not list their publishers (vLLM before 0.31) may dial us all the same."""
        return [KvEventsConfig()] if self._bound.endpoint else []

    async def _sleeping(self, replica: Replica, watch: _Watch, *, learn: bool) -> bool:
        """Asked each time where the engine can be put to sleep over HTTP, else now and then."""
        if learn or (replica.sleeping and not watch.dev_mode):
            with contextlib.suppress(TimeoutError, UpstreamError, ProbeFailed):
                replica.engine_load = await self._gauges(replica)
        if watch.dev_mode:
            return is_sleeping(await ask_optional(replica, "/is_sleeping", self._limit_s))
        return replica.engine_load.sleeping

    async def _gauges(self, replica: Replica) -> EngineLoad:
        answer = await ask(replica, "/metrics", self._limit_s)
        text = answer.body.decode("utf-8", "replace")
        return engine_load(text) if answer.status == 200 else EngineLoad()

    async def _judge_forever(self) -> None:
        while True:
            await asyncio.sleep(JUDGE_INTERVAL_S)
            for replica in self._fleet.judge():
                logger.warning("replica %s: %s", replica.name, replica.explanation())


class _Watch:
    """What the prober remembers of one replica."""

    def __init__(self) -> None:
        self.soon = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.count = 0
        self.missed = 0
        self.told: str | None = None
        self.dev_mode = False
        self.doubted = False

    def doubt(self) -> None:
        """Ask now: the replica is silent though something was asked of it."""
        self.doubted = True
        self.soon.set()
