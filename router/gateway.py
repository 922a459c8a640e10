"""The parts of one running gateway: wired together here, started and ended here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from cache_index.flights import Flights
from cache_index.service import CacheIndex
from cache_index.types import ListenerStatus, SourceSpec, SourceStatus
from router.catalogue import Catalogue
from router.clients import Clients
from router.config import Settings
from router.discovery import DnsDiscovery, dns_names, static_replicas
from router.dispatch import Dispatcher
from router.doctor.watch import DoctorCollector, DoctorWatch
from router.explainer import Explainer
from router.forward import Forwarder
from router.health import Prober
from router.identify import Identifier, load_tokenizers
from router.lists import ObjectLists
from router.load import FleetLoad
from router.meter import PrefillMeter
from router.metrics import FleetCollector, Metrics
from router.outliers import OutlierRules
from router.owners import Owners
from router.placement import Placer, PrefixIndex
from router.planning import Planner
from router.policy import POLICIES
from router.receipts import Receipts
from router.relay import Relay
from router.replicas import Fleet, Replica


class Index(PrefixIndex, Protocol):
    """What the gateway needs of the index; `CacheIndex` is it."""

    @property
    def available(self) -> bool:
        """Whether matches are being answered."""
        ...

    @property
    def redis_url(self) -> str | None:
        """The server in use, once started."""
        ...

    async def start(self) -> None:
        """Begin to follow the sources."""
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...

    @property
    def flights(self) -> Flights:
        """Where prompts in flight are made known."""
        ...

    def set_sources(self, specs: Collection[SourceSpec]) -> None:
        """Declare the publishers to follow."""
        ...

    def sources(self) -> list[SourceStatus]:
        """Trust and progress of each source."""
        ...

    def listeners(self) -> list[ListenerStatus]:
        """Sockets that publishers dial."""
        ...

    def void(self, replica: str, reason: str) -> None:
        """Forget what a replica's own cache holds."""
        ...


@dataclass(slots=True)
class Gateway:
    """The parts of one running gateway."""

    settings: Settings
    registry: CollectorRegistry
    fleet: Fleet
    load: FleetLoad
    index: Index
    identifier: Identifier
    owners: Owners
    catalogue: Catalogue
    lists: ObjectLists
    metrics: Metrics
    discovery: DnsDiscovery
    prober: Prober
    relay: Relay
    clients: Clients
    receipts: Receipts
    explainer: Explainer
    doctor: DoctorWatch

    @classmethod
    def build(cls, settings: Settings, index: Index | None = None) -> Gateway:
        """Wire the parts together; nothing is started. Raises ConfigError."""
        registry = CollectorRegistry()
        load = FleetLoad(settings.prefill_tokens_per_s, time.monotonic)
        make = partial(Replica.from_config, settings=settings)
        rules = OutlierRules(
            error_share=settings.eject_error_share,
            ttft_factor=settings.eject_ttft_factor,
            eject_s=settings.eject_s,
        )
        fleet = Fleet(map(make, static_replicas(settings)), load, rules)
        index = index or CacheIndex(
            redis_url=settings.redis_url,
            base_unit_tokens=settings.base_unit_tokens,
            registry=registry,
            listen=settings.kv_events_bind,
        )
        metrics = Metrics(registry)
        registry.register(FleetCollector(fleet, load))

        def retire(replica: Replica) -> None:
            replica.pool.close_idle()
            if replica.name not in fleet.replicas:
                metrics.forget(replica.name)

        fleet.on_retired.append(retire)
        placer = Placer(
            index,
            load,
            POLICIES[settings.policy],
            base_unit_tokens=settings.base_unit_tokens,
            running_share=settings.running_share,
            random=Random(),
        )
        tokenizers = load_tokenizers(settings)
        identifier = Identifier(tokenizers, metrics, timeout_s=settings.render_timeout_s)
        doctor = DoctorWatch(fleet, settings, tokenizers)
        registry.register(DoctorCollector(doctor))
        prober = Prober(
            fleet,
            settings,
            lambda: index.set_sources(fleet.source_specs()),
            lambda name: index.void(name, "its engine slept"),
        )
        discovery = DnsDiscovery(
            fleet, dns_names(settings), make, interval_s=settings.dns_interval_s
        )
        owners = Owners(lambda: index.redis_url)
        catalogue = Catalogue(fleet, settings.model_aliases)
        planner = Planner(settings, fleet, catalogue, placer, identifier, owners)
        forwarder = Forwarder(settings, metrics, owners)
        meter = PrefillMeter(index.flights, settings.base_unit_tokens)
        dispatcher = Dispatcher(settings, planner, placer, load, forwarder, metrics, meter)
        receipts = Receipts(settings.receipts)
        relay = Relay(settings, planner, dispatcher, metrics, receipts)
        clients = Clients(settings, registry)
        return cls(
            settings=settings,
            registry=registry,
            fleet=fleet,
            load=load,
            index=index,
            identifier=identifier,
            owners=owners,
            catalogue=catalogue,
            lists=ObjectLists(fleet, owners),
            metrics=metrics,
            discovery=discovery,
            prober=prober,
            relay=relay,
            clients=clients,
            receipts=receipts,
            explainer=Explainer(settings, fleet, planner, placer, receipts, index.sources),
            doctor=doctor,
        )

    @property
    def draining(self) -> bool:
        """Whether the gateway is on its way out."""
        return self.clients.draining

    def drain(self) -> None:
        """Be ready for nothing new: /readyz says so, answers are their connections' last."""
        self.clients.draining = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start what runs in the background, and end it whatever happens."""
        await self.index.start()
        try:
            await self.discovery.start()
            await self.prober.start()
            await self.doctor.start()
            yield
        finally:
            self.drain()
            await self.doctor.close()
            await self.discovery.close()
            await self.prober.close()
            await self.identifier.close()
            await self.lists.close()
            await self.owners.close()
            for replica in self.fleet.replicas.values():
                replica.pool.close_idle()
            await self.index.close()

    def replica_states(self) -> dict[str, dict[str, Any]]:
        """What /readyz says of each replica."""
        self.fleet.refresh()
        trust: dict[str, list[str]] = {}
        reasons: dict[str, list[str]] = {}
        for source in self.index.sources():
            trust.setdefault(source.replica, []).append(str(source.trust))
            if source.reason:
                reasons.setdefault(source.replica, []).append(source.reason)
        return {
            replica.name: {
                **replica.describe(),
                "trust": _weakest(trust.get(replica.name, ())),
                "trust_reason": "; ".join(reasons.get(replica.name, ()))
                or ("" if replica.name in trust else "it publishes no KV events"),
            }
            for replica in self.fleet.replicas.values()
        }


def _weakest(levels: list[str] | tuple[()]) -> str:
    order = ("none", "partial", "exact")
    return min(levels, key=order.index, default="none")
