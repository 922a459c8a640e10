"""The doctor in a gateway: examines each replica at start-up, when it joins, and when it is back.

Nothing waits for it, and nothing is decided by it: it only says what it found, once in the log, as
a metric, and for as long as it stands under /admin/status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import httpx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import SecretStr

from cache_index.tasks import end
from cache_index.types import SourceSpec
from router.config import ReplicaConfig, Settings
from router.doctor.facts import ReplicaFacts
from router.doctor.findings import findings
from router.doctor.gather import Examiner
from router.doctor.verdict import Finding, Severity
from router.replicas import Fleet, Replica
from router.tokenizing import ModelTokenizer

logger = logging.getLogger("kvroute.doctor")

LOOK_S = 1.0
"""How often the fleet is looked over for replicas to examine; that costs no question."""
LEAST_PAUSE_S = 20.0
"""A replica that comes and goes is not examined more often than this."""
AT_ONCE = 4
ANSWER_S = 5.0
_LEVELS = {
    Severity.ERROR: logging.WARNING,
    Severity.WARNING: logging.WARNING,
    Severity.NOTE: logging.INFO,
}


class _Life(NamedTuple):
    """What makes a replica another one to the doctor: it was down, or serves something else."""

    down_since_s: float
    models: tuple[str, ...]
    sources: tuple[SourceSpec, ...]


class _Seen(NamedTuple):
    replica: Replica
    life: _Life
    begun_s: float
    facts: ReplicaFacts | None = None
    at_s: float = 0.0


class DoctorWatch:
    """Findings about the fleet as it is. Off, unless the setting `doctor` says otherwise."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        tokenizers: Mapping[str, ModelTokenizer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._fleet = fleet
        self._settings = settings
        self._tokenizers = tokenizers
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._examiner: Examiner | None = None
        self._look: asyncio.Task[None] | None = None
        fleet.on_removed.append(self._forget)

    async def start(self) -> None:
        """Begin to look after the fleet in the background."""
        if self._settings.doctor == "off":
            return
        active = self._settings.doctor == "active"
        client = httpx.AsyncClient(trust_env=False)
        self._examiner = Examiner(client, self._settings, self._tokenizers, ANSWER_S, active)
        self._look = asyncio.create_task(self._look_forever())

    async def close(self) -> None:
        """Stop examining."""
        look, self._look = self._look, None
        await end(*(() if look is None else (look,)), *self._tasks)
        examiner, self._examiner = self._examiner, None
        if examiner is not None:
            await examiner.client.aclose()

    def describe(self) -> dict[str, Any]:
        """What is known, as JSON; times are Unix seconds."""
        examined = {
            name: {"at": seen.at_s, "probed": seen.facts.probe is not None}
            for name, seen in self._seen.items()
            if seen.facts is not None
        }
        return {
            "mode": self._settings.doctor,
            "examined": examined,
            "findings": [each.describe() for each in self.findings],
        }

    # Whom to examine

    async def _look_forever(self) -> None:
        while True:
            for replica in list(self._fleet.replicas.values()):
                if replica.ready and self._due(replica):
                    self._begin(replica)
            await asyncio.sleep(LOOK_S)

    def _due(self, replica: Replica) -> bool:
        seen = self._seen.get(replica.name)
        if seen is None or seen.replica is not replica:
            return True
        rested = self._clock() - seen.begun_s >= LEAST_PAUSE_S
        return rested and seen.life != _life(replica)

    def _begin(self, replica: Replica) -> None:
        before = self._seen.get(replica.name)
        facts = before.facts if before is not None and before.replica is replica else None
        at_s = before.at_s if before is not None and facts is not None else 0.0
        self._seen[replica.name] = _Seen(replica, _life(replica), self._clock(), facts, at_s)
        task = asyncio.create_task(self._examine(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examine(self, replica: Replica) -> None:
        examiner = self._examiner
        assert examiner is not None
        try:
            async with self._slots:
                facts = await examiner.examine(_config(replica))
        except Exception:
            logger.exception("examining replica %s failed", replica.name)
            return
        seen = self._seen.get(replica.name)
        if seen is not None and seen.replica is replica:
            self._seen[replica.name] = seen._replace(facts=facts, at_s=time.time())
            self._judge()

    def _forget(self, replica: Replica) -> None:
        seen = self._seen.get(replica.name)
        if seen is not None and seen.replica is replica:
            del self._seen[replica.name]
            self._judge()

    # What is found

    def _judge(self) -> None:
        """All facts again: what is wrong between replicas depends on who is there."""
        facts = [seen.facts for seen in self._seen.values() if seen.facts is not None]
        told = set(self.findings)
        self.findings = findings(tuple(facts), self._settings)
        for each in self.findings:
            if each not in told:
                message = "%s %s: %s (%s). To mend it: %s"
                words = (each.code, each.replica, each.seen, each.why, each.mend)
                logger.log(_LEVELS[each.severity], message, *words)


class DoctorCollector(Collector):
    """How much is wrong, read when scraped."""

    def __init__(self, watch: DoctorWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterable[Metric]:
        """One sample for each severity."""
        family = GaugeMetricFamily(
            "kvroute_doctor_findings", "What the doctor finds wrong now.", labels=("severity",)
        )
        counts = Counter(each.severity for each in self._watch.findings)
        for severity in Severity:
            family.add_metric((str(severity),), counts[severity])
        yield family


def _life(replica: Replica) -> _Life:
    return _Life(replica.down_since_s, tuple(sorted(replica.models)), replica.sources)


def _config(replica: Replica) -> ReplicaConfig:
    """The replica as settings would name it."""
    key = replica.authorization
    return ReplicaConfig(
        url=replica.url,
        name=replica.name,
        kv_events=replica.declared_events,
        api_key=SecretStr(key.decode().removeprefix("Bearer ")) if key else None,
    )
