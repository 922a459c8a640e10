"""The application: every route is declared here; the hot ones are served by the relay.

FastAPI gives the routes, their documentation and the control plane. A request to a hot route does
not pass through it: `HotPath` looks the path up and calls the relay, which is the same ASGI
application that FastAPI would have called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from router.admin import admin_routes
from router.clients import CLIENTS_KEY, Clients
from router.config import Settings
from router.control import control_routes
from router.decisions import decision_routes
from router.envelope import Envelope, declare_errors
from router.errors import MethodNotAllowed
from router.event_sources import source_routes
from router.gateway import Gateway, Index
from router.relay import Relay, RelayResponse
from router.replicas import Replica
from router.routes import ANY_METHOD, OTHER, ROUTES, Kind, Route
from router.status import status_routes

__all__ = ["Gateway", "HotPath", "create_app"]


class HotPath:
    """Serves hot routes straight from the relay and everything else through FastAPI."""

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        self.app = app
        self.gateway = gateway
        self._relay = gateway.relay
        self._framework = Envelope(app, gateway.metrics, access_log=gateway.settings.access_log)
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
        await self._framework(scope, receive, send)


def create_app(settings: Settings, index: Index | None = None) -> HotPath:
    """The gateway as an ASGI application. Raises ConfigError."""
    gateway = Gateway.build(settings, index)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Clients]]:
        async with gateway.running():
            yield {CLIENTS_KEY: gateway.clients}

    app = FastAPI(title="kvroute", lifespan=lifespan)
    app.include_router(control_routes(gateway))
    make = partial(Replica.from_config, settings=settings)
    app.include_router(admin_routes(settings, gateway.fleet, make))
    app.include_router(status_routes(gateway))
    app.include_router(source_routes(settings, gateway.index))
    app.include_router(decision_routes(settings, gateway.receipts, gateway.explainer))
    for route in ROUTES:
        _declare(app, gateway.relay, route)
    declare_errors(app)
    return HotPath(app, gateway)


def _declare(app: FastAPI, relay: Relay, route: Route) -> None:
    for method in route.methods:  # one each, so that each has its own id in the documentation
        app.add_api_route(
            route.path,
            _endpoint(relay, route),
            methods=[method],
            summary=route.summary,
            response_class=Response,
        )
    if route.kind in (Kind.GENERATE, Kind.MODEL, Kind.UPLOAD):
        # A browser's preflight is the engine's to answer: it decides which origins it takes.
        preflight = _endpoint(relay, OTHER)
        app.add_api_route(route.path, preflight, methods=["OPTIONS"], include_in_schema=False)
        _refuse_others(app, route)


def _refuse_others(app: FastAPI, route: Route) -> None:
    """Methods that a route does not take must not fall through to the catch-all."""
    taken = (*route.methods, "GET") if route.listed else route.methods
    others = [each for each in ANY_METHOD if each not in taken]

    async def refuse() -> Response:
        raise MethodNotAllowed(route.path, ", ".join(sorted(taken)))

    app.add_api_route(route.path, refuse, methods=others, include_in_schema=False)


def _endpoint(relay: Relay, route: Route) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return RelayResponse(relay, route)

    return endpoint
