"""The replicas: what is known of each, which may get a request now, who joins and who leaves.

Everything here happens on one event loop and without awaiting, so that each change is whole. A
replica's facts are written by the prober, its fate by `report`, its place by the fleet.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cache_index.types import SourceSpec
from router.breaker import Breaker, BreakerRules, Outcome, State
from router.config import KvEventsConfig, ReplicaConfig, Settings
from router.engines import EngineKind, EngineLoad, ServedModel
from router.load import FleetLoad, Inflight
from router.outliers import (
    Kind,
    OutlierRules,
    Standing,
    Traffic,
    ejection_s,
    excess,
    next_repeats,
    outliers,
)
from router.publishers import Owner
from router.upstream import ReplicaPool

__all__ = ["STATES", "Ejection", "Fleet", "Replica", "ServedModel"]

STATES = ("up", "slow_start", "half_open", "open", "ejected", "sleeping", "draining", "down")
MAX_RETRY_AFTER_S = 30
"""Clients do not wait for much longer than that: the openai SDK for a minute at the most."""
_BREAKER_STATES = {
    State.CLOSED: "up",
    State.SLOW_START: "slow_start",
    State.HALF_OPEN: "half_open",
    State.OPEN: "open",
}
_FAILURES = frozenset({Outcome.SERVER_ERROR, Outcome.REFUSED, Outcome.CUT, Outcome.TIMEOUT})
_WITHOUT_WORD = frozenset({Outcome.CUT, Outcome.TIMEOUT})


@dataclass(slots=True)
class Ejection:
    """Whether a replica is ejected as an outlier, and how often it has been."""

    kind: Kind | None = None
    since_s: float | None = None
    until_s: float = math.inf
    repeats: int = 0
    let_in_at_s: float = -math.inf


@dataclass(slots=True, eq=False)
class Replica:
    """One serving engine. A replica that was removed and comes back is another object."""

    name: str
    url: str
    pool: ReplicaPool
    base_path: bytes
    netloc: bytes
    declared_events: list[KvEventsConfig] | None
    authorization: bytes | None = field(repr=False)
    breaker: Breaker
    traffic: Traffic
    kind: EngineKind = EngineKind.UNKNOWN
    ready: bool = False
    reason: str = "not probed yet"
    sleeping: bool = False
    draining: bool = False
    leaving: bool = False
    newcomer: bool = False
    ranks: tuple[int, ...] = (0,)
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    sources: tuple[SourceSpec, ...] = ()
    engine_load: EngineLoad = field(default_factory=EngineLoad)
    ejection: Ejection = field(default_factory=Ejection)
    inflight: Inflight = field(default_factory=Inflight)
    changed: Callable[[Replica, State | None], None] = lambda replica, state: None
    doubt: Callable[[], None] = lambda: None
    """To be called when it is silent while something is asked of it."""
    clock: Callable[[], float] = time.monotonic
    down_since_s: float = 0.0

    @classmethod
    def from_config(
        cls,
        config: ReplicaConfig,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> Replica:
        """A replica that has not been probed yet."""
        parts = urlsplit(config.url)
        pool = ReplicaPool(
            parts.hostname or "",
            parts.port or 80,
            connect_timeout_s=settings.connect_timeout_s,
            keepalive_s=settings.keepalive_s,
        )
        rules = BreakerRules(settings.breaker_failures, slow_start_s=settings.slow_start_s)
        key = config.api_key or settings.replica_api_key
        replica = cls(
            name=config.name,
            url=config.url,
            pool=pool,
            base_path=parts.path.encode(),
            netloc=parts.netloc.encode(),
            declared_events=config.kv_events,
            authorization=f"Bearer {key.get_secret_value()}".encode() if key else None,
            breaker=Breaker(rules, clock),
            traffic=Traffic(clock),
            clock=clock,
            down_since_s=clock(),
        )
        replica.breaker.changed = replica._breaker_changed
        return replica

    @property
    def host(self) -> str:
        """Where its publishers are too."""
        return urlsplit(self.url).hostname or ""

    @property
    def owner(self) -> Owner:
        """As whose its publishers are known."""
        return Owner(self.name, self.host, self.netloc.decode())

    @property
    def ranked(self) -> bool:
        """Whether a request must say which data-parallel rank it is for."""
        return len(self.ranks) > 1

    @property
    def state(self) -> str:
        """One of STATES: what most keeps it from taking requests."""
        if self.draining:
            return "draining"
        if not self.ready:
            return "down"
        if self.sleeping:
            return "sleeping"
        if self.ejection.kind is not None:
            return "ejected"
        return _BREAKER_STATES[self.breaker.state]

    @property
    def healthy(self) -> bool:
        """Whether it takes requests, if only a few."""
        return self.state in ("up", "slow_start", "half_open")

    @property
    def admits(self) -> bool:
        """Whether one more request fits what a trial or a slow start allows."""
        return self.inflight.recent < self.breaker.allowance

    # What the relay says

    def report(self, outcome: Outcome, ttft_s: float | None = None) -> None:
        """One attempt has ended. `ttft_s` of a streaming 200, unless `began` was told."""
        if ttft_s is not None:
            self.traffic.add_ttft(ttft_s)
        if outcome is Outcome.ABANDONED:
            return
        self.traffic.add(failed=outcome in _FAILURES)
        if outcome is Outcome.REFUSED:
            if self.ready:
                self.failed("it refused a connection")
        elif outcome in _WITHOUT_WORD:
            self.breaker.failed()
        elif outcome is not Outcome.SERVER_ERROR:
            self.breaker.succeeded()

    def began(self, ttft_s: float | None = None) -> None:
        """An answer below 500 has begun: a trial is passed without waiting for its end.

        `ttft_s` from the attempt's start to the first byte, of a streaming 200.
        """
        if ttft_s is not None:
            self.traffic.add_ttft(ttft_s)
        if self.breaker.state is State.HALF_OPEN:
            self.breaker.succeeded()

    def failed(self, reason: str) -> None:
        """It could not be reached: nothing is sent there until a probe succeeds."""
        was, self.ready, self.reason = self.ready, False, reason
        self.breaker.refused()
        if was:
            self.down_since_s = self.clock()
            self.changed(self, None)

    # What the prober says

    def learned(
        self,
        models: Mapping[str, ServedModel],
        sources: tuple[SourceSpec, ...],
        ranks: tuple[int, ...],
    ) -> None:
        """What it serves, and where its events are."""
        news = self.models.keys() != models.keys()
        self.models, self.sources, self.ranks = models, sources, ranks
        if news:
            self.changed(self, None)

    def passed(self, *, sleeping: bool) -> None:
        """A probe succeeded."""
        woke = self.sleeping and not sleeping
        news = woke or self.newcomer or not self.ready or sleeping != self.sleeping
        if not self.ready:  # another life: what its last one did says nothing of this one
            self.traffic.clear()
            if self.ejection.kind is not None:
                self.ejection.until_s = -math.inf  # the fleet lets it in
        self.ready, self.reason, self.sleeping = True, "", sleeping
        self.breaker.probe_succeeded()
        if woke or self.newcomer:
            self.newcomer = False
            self.start_slowly()
        if news:
            self.changed(self, None)

    def start_slowly(self) -> None:
        """Give it work little by little; what runs already is not counted."""
        if self.breaker.state in (State.CLOSED, State.SLOW_START):
            self.inflight.renew()
            self.breaker.start_slowly()

    def _breaker_changed(self, state: State) -> None:
        if state is State.HALF_OPEN:
            self.inflight.renew()
        self.changed(self, state)

    def explanation(self) -> str:
        """Why it gets no requests, or fewer; empty when it is up."""
        return {
            "down": self.reason,
            "draining": "draining" + (", then removed" if self.leaving else ""),
            "sleeping": "the engine sleeps",
            "ejected": f"ejected as an outlier: {self.ejection.kind}",
            "open": "several requests in a row failed",
            "half_open": "one trial request at a time",
            "slow_start": "back for a short time",
        }.get(self.state, "")

    def describe(self) -> dict[str, Any]:
        """Its state as JSON."""
        return {
            "url": self.url,
            "kind": str(self.kind),
            "healthy": self.healthy,
            "state": self.state,
            "reason": self.explanation(),
            "models": sorted(self.models),
            "ranks": list(self.ranks),
            "requests": self.inflight.running,
            "engine_running": self.engine_load.running,
            "engine_waiting": self.engine_load.waiting,
        }


class _Group(NamedTuple):
    """Who serves one model: freely, within an allowance, and only when nobody else can."""

    free: list[Replica]
    limited: list[Replica]
    spare: list[Replica]


class Fleet:
    """All replicas, by name. The one owner of who belongs to it and of who is ejected."""

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        load: FleetLoad | None = None,
        rules: OutlierRules = OutlierRules(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.on_added: list[Callable[[Replica], None]] = []
        self.on_removed: list[Callable[[Replica], None]] = []
        self.on_retired: list[Callable[[Replica], None]] = []
        self.on_opened: list[Callable[[Replica], None]] = []
        self.transitions: Counter[State] = Counter(dict.fromkeys(State, 0))
        self.ejections: Counter[Kind] = Counter(dict.fromkeys(Kind, 0))
        self._load = load or FleetLoad(1.0, clock)
        self._rules = rules
        self._clock = clock
        self._groups: dict[str | None, _Group] = {}
        self._stale_at_s = -math.inf
        for replica in replicas:
            self.add(replica)

    # Who may get a request: on the way of every request

    def serving(
        self, model: str | None, without: Collection[str] = (), only: str | None = None
    ) -> list[Replica]:
        """Replicas that may be sent a request for a model (None: any) now; not to be changed.

        Those at their allowance, ejected, or open though they answer probes, are among them only
        when there is nobody else: a request is rather tried than refused. `only` names the one
        replica that can serve it at all, whose allowance then does not matter.
        """
        self.refresh()
        group = self._groups.get(model)
        if group is None:
            return []
        if only is not None:
            found = [each for part in group for each in part if each.name == only]
        elif group.limited:
            found = group.free + [each for each in group.limited if each.admits]
        else:
            found = group.free
        if without:
            found = [each for each in found if each.name not in without]
        if not found and only is None:
            rest = [each for each in group.limited if each.name not in without]
            found = rest or [each for each in group.spare if each.name not in without]
        return found

    def retry_after_s(self, model: str | None, only: str | None = None) -> int:
        """Seconds after which a request that nobody takes now may be sent again.

        Nobody knows when an outage ends. One that has lasted for a minute will hardly be over in a
        second: as long again as the shortest one that matters here, within bounds.
        """
        now_s = self._clock()
        lasted_s = [
            now_s - each.down_since_s
            for each in self.replicas.values()
            if each.state == "down"
            and only in (None, each.name)
            and (model is None or not each.models or model in each.models)
        ]
        return max(min(math.ceil(min(lasted_s, default=0.0)), MAX_RETRY_AFTER_S), 1)

    def taking(self) -> list[Replica]:
        """Replicas that take requests, whatever they serve."""
        return self.serving(None)

    def refresh(self) -> None:
        """Do what time alone changes, and what follows from any change; cheap when nothing did."""
        now_s = self._clock()
        if now_s < self._stale_at_s:
            return
        for replica in self.replicas.values():
            replica.breaker.advance()
            if replica.ejection.until_s <= now_s:
                self._let_in(replica)
        self._let_in_excess()
        self._groups = self._grouped()
        self._stale_at_s = min(
            (
                min(each.breaker.next_change_s, each.ejection.until_s)
                for each in self.replicas.values()
            ),
            default=math.inf,
        )

    def _grouped(self) -> dict[str | None, _Group]:
        groups: dict[str | None, _Group] = defaultdict(lambda: _Group([], [], []))
        for replica in self.replicas.values():
            part = _part(replica)
            if part is not None:
                for model in (None, *replica.models):
                    groups[model][part].append(replica)
        return dict(groups)

    # Outliers

    def judge(self) -> list[Replica]:
        """Eject who does much worse than its peers, and say whom. Called about once a second."""
        self.refresh()
        ejected = []
        least = self._rules.least_ttfts
        for peers in self._peers().values():
            group = [
                each.traffic.standing(each.name, each.ejection.since_s, least) for each in peers
            ]
            for name, kind in outliers(group, self._rules).items():
                self._eject(self.replicas[name], kind)
                ejected.append(self.replicas[name])
        return ejected

    def _let_in_excess(self) -> None:
        if all(each.ejection.kind is None for each in self.replicas.values()):
            return
        for peers in self._peers().values():
            group = [Standing(each.name, 0, 0, None, each.ejection.since_s) for each in peers]
            for name in excess(group):
                self._let_in(self.replicas[name])

    def _peers(self) -> dict[str, list[Replica]]:
        """By base model: replicas that take requests, or would if they were not ejected."""
        groups: dict[str, list[Replica]] = defaultdict(list)
        for replica in self.replicas.values():
            usable = replica.healthy or replica.state == "ejected"
            if usable and replica.breaker.state is not State.OPEN and replica.models:
                groups[next(iter(replica.models.values())).base].append(replica)
        return groups

    def _eject(self, replica: Replica, kind: Kind) -> None:
        now_s, before = self._clock(), replica.ejection
        well_s = now_s - before.let_in_at_s if before.repeats else 0.0
        repeats = next_repeats(before.repeats, well_s, self._rules)
        until_s = now_s + ejection_s(repeats, self._rules)
        replica.ejection = Ejection(kind, now_s, until_s, repeats)
        self.ejections[kind] += 1
        self._changed(replica, None)

    def _let_in(self, replica: Replica) -> None:
        repeats = replica.ejection.repeats
        replica.ejection = Ejection(repeats=repeats, let_in_at_s=self._clock())
        replica.traffic.clear()
        replica.start_slowly()
        self._changed(replica, None)

    # Who belongs to it

    def add(self, replica: Replica) -> None:
        """Take a replica in. Raises KeyError when its name is taken."""
        if replica.name in self.replicas:
            raise KeyError(replica.name)
        self.replicas[replica.name] = replica
        replica.inflight = self._load.inflight(replica.name)
        replica.changed = self._changed
        self._stale_at_s = -math.inf
        for call in self.on_added:
            call(replica)

    def drain(self, replica: Replica) -> None:
        """No new requests; those that run go on."""
        replica.draining = True
        self._changed(replica, None)

    def undrain(self, replica: Replica) -> None:
        """Take requests again; also takes a removal back that waits for running requests."""
        replica.draining = replica.leaving = False
        replica.inflight.on_idle = None
        self._changed(replica, None)

    def remove(self, replica: Replica, *, force: bool = False) -> None:
        """Drain, and forget it with its last request; `force`: forget it now, let those end."""
        self.drain(replica)
        replica.leaving = True
        if replica.inflight.running and not force:
            replica.inflight.on_idle = lambda: self._forget(replica)
        else:
            self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        if self.replicas.get(replica.name) is not replica:
            return
        del self.replicas[replica.name]
        self._load.forget(replica.name)
        self._stale_at_s = -math.inf
        for call in self.on_removed:
            call(replica)
        if replica.inflight.running:
            replica.inflight.on_idle = lambda: self._retire(replica)
        else:
            self._retire(replica)

    def _retire(self, replica: Replica) -> None:
        """The last request of a removed replica has ended."""
        for call in self.on_retired:
            call(replica)

    def _changed(self, replica: Replica, state: State | None) -> None:
        self._stale_at_s = -math.inf
        if state is None:
            return
        self.transitions[state] += 1
        if state is State.OPEN:
            for call in self.on_opened:
                call(replica)

    # What is served

    def model_names(self) -> list[str]:
        """Every model name that any replica is known to serve, sorted."""
        return sorted({name for replica in self.replicas.values() for name in replica.models})

    def known(self, model: str) -> bool:
        """Whether any replica, healthy or not, is known to serve the model."""
        return any(model in replica.models for replica in self.replicas.values())

    def model_cards(self) -> list[dict[str, Any]]:
        """The union of the healthy replicas' model cards, each with who serves it."""
        cards: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            for name, model in replica.models.items() if replica.healthy else ():
                card = cards.setdefault(name, {**model.card, "kvroute_replicas": []})
                card["kvroute_replicas"].append(replica.name)
        return list(cards.values())

    def any_healthy(self) -> bool:
        """Whether at least one replica can take a request."""
        self.refresh()
        return any(replica.healthy for replica in self.replicas.values())

    def source_specs(self) -> list[SourceSpec]:
        """The KV event publishers of all replicas."""
        return [spec for replica in self.replicas.values() for spec in replica.sources]


def _part(replica: Replica) -> int | None:
    """Where in a group a replica stands; None: nowhere."""
    state = replica.state
    if state in ("draining", "down", "sleeping"):
        return None
    if state in ("ejected", "open"):
        return 2
    return 0 if state == "up" else 1
