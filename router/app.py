"""The application: every route is declared here; the hot ones are served by the relay.

FastAPI gives the routes, their documentation and the control plane. A request to a hot route does
not pass through it: `HotPath` looks the path up and calls the relay, which is the same ASGI
application that FastAPI would have called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import Receive, Scope, Send

from cache_index.service import CacheIndex
from cache_index.types import SourceSpec, SourceStatus
from router.admin import admin_routes
from router.clients import CLIENTS_KEY, Clients
from router.config import Settings
from router.discovery import DnsDiscovery, dns_names, static_replicas
from router.dispatch import Dispatcher
from router.errors import InvalidRequest, ModelNotFound, RequestError
from router.forward import Forwarder
from router.health import Prober
from router.identify import Identifier, load_tokenizers
from router.load import FleetLoad
from router.metrics import FleetCollector, Metrics
from router.outliers import OutlierRules
from router.owners import Owners
from router.placement import Placer, PrefixIndex
from router.planning import Planner
from router.policy import POLICIES
from router.relay import Relay
from router.replicas import Fleet, Replica
from router.routes import ROUTES, Kind, Route


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

    def set_sources(self, specs: Collection[SourceSpec]) -> None:
        """Declare the publishers to follow."""
        ...

    def sources(self) -> Sequence[SourceStatus]:
        """Trust and progress of each source."""
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
    discovery: DnsDiscovery
    prober: Prober
    relay: Relay
    clients: Clients

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
        identifier = Identifier(
            load_tokenizers(settings), metrics, timeout_s=settings.render_timeout_s
        )
        prober = Prober(fleet, settings, lambda: index.set_sources(fleet.source_specs()))
        discovery = DnsDiscovery(
            fleet, dns_names(settings), make, interval_s=settings.dns_interval_s
        )
        owners = Owners(lambda: index.redis_url)
        planner = Planner(settings, fleet, placer, identifier, owners)
        forwarder = Forwarder(settings, metrics, owners)
        dispatcher = Dispatcher(settings, planner, placer, load, forwarder, metrics)
        relay = Relay(settings, planner, dispatcher, metrics)
        clients = Clients(settings, registry)
        return cls(
            settings,
            registry,
            fleet,
            load,
            index,
            identifier,
            owners,
            discovery,
            prober,
            relay,
            clients,
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
            yield
        finally:
            self.drain()
            await self.discovery.close()
            await self.prober.close()
            await self.identifier.close()
            await self.owners.close()
            for replica in self.fleet.replicas.values():
                replica.pool.close_idle()
            await self.index.close()

    def model_cards(self) -> list[dict[str, Any]]:
        """Cards of what is served, and of the aliases for it."""
        cards = {card["id"]: card for card in self.fleet.model_cards()}
        for alias, target in self.settings.model_aliases.items():
            if target in cards and alias not in cards:
                cards[alias] = {**cards[target], "id": alias, "root": target}
        return list(cards.values())

    def known_models(self) -> list[str]:
        """Every name a request may use."""
        return sorted({*self.fleet.model_names(), *self.settings.model_aliases})

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


class HotPath:
    """Serves hot routes straight from the relay and everything else through FastAPI."""

    def __init__(self, app: FastAPI, relay: Relay) -> None:
        self.app = app
        self._relay = relay
        self.gateway: Gateway = app.state.gateway
        declared = {getattr(route, "path", None) for route in app.routes}
        self._hot = {
            route.path: route
            for route in ROUTES
            if route.kind is Kind.GENERATE and route.path in declared
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._hot.get(scope["path"].rstrip("/"))
            if route is not None:
                await self._relay.serve(route, scope, receive, send)
                return
        await self.app(scope, receive, send)


class RelayResponse(Response):
    """What a data route answers when it is reached through FastAPI: the relay takes over."""

    def __init__(self, relay: Relay, route: Route) -> None:
        super().__init__()
        self._relay = relay
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the connection over."""
        await self._relay.serve(self._route, scope, receive, send)


def create_app(settings: Settings, index: Index | None = None) -> HotPath:
    """The gateway as an ASGI application. Raises ConfigError."""
    gateway = Gateway.build(settings, index)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Clients]]:
        async with gateway.running():
            yield {CLIENTS_KEY: gateway.clients}

    app = FastAPI(title="kvroute", lifespan=lifespan)
    app.state.gateway = gateway
    _declare_control(app, gateway)
    make = partial(Replica.from_config, settings=settings)
    app.include_router(admin_routes(settings, gateway.fleet, make))
    _declare_data(app, gateway)
    _declare_errors(app)
    return HotPath(app, gateway.relay)


def _declare_data(app: FastAPI, gateway: Gateway) -> None:
    for route in ROUTES:
        for method in route.methods:  # one each, so that each has its own id in the documentation
            app.add_api_route(
                route.path,
                _endpoint(gateway.relay, route),
                methods=[method],
                summary=route.summary,
                response_class=Response,
            )


def _endpoint(relay: Relay, route: Route) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return RelayResponse(relay, route)

    return endpoint


def _declare_control(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The union of what the healthy replicas serve, and which replicas serve each."""
        return {"object": "list", "data": gateway.model_cards()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model's card."""
        for card in gateway.model_cards():
            if card["id"] == name:
                return card
        raise ModelNotFound(name, gateway.known_models())

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """200 while at least one replica takes requests and the gateway is not draining."""
        ready = gateway.fleet.any_healthy() and not gateway.draining
        content = {
            "status": "ready" if ready else "not ready",
            "index": "available" if gateway.index.available else "unavailable",
            "replicas": gateway.replica_states(),
        }
        return JSONResponse(content, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        text = await asyncio.to_thread(generate_latest, gateway.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


class _NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class _MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


def _declare_errors(app: FastAPI) -> None:
    """Unknown routes and methods answer in OpenAI's shape too."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        shaped = _routing_error(request, getattr(error, "status_code", 500))
        return JSONResponse(shaped.payload(), status_code=shaped.status)

    async def own(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        return JSONResponse(error.payload(), status_code=error.status, headers=headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        shaped = InvalidRequest(f"{where or 'The request'}: {first['msg']}.", param=where)
        return JSONResponse(shaped.payload(), status_code=shaped.status)

    for status in (404, 405):
        app.add_exception_handler(status, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(RequestError, own)


def _routing_error(request: Request, status: int) -> RequestError:
    where = f"{request.method} {request.url.path}"
    if status == 405:
        return _MethodNotAllowed(f"{where}: this route takes another method.")
    return _NotFound(f"{where}: no such route. GET /docs lists the routes.")
