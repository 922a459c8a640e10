"""Routes that the gateway answers itself: models, lists of objects, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from router.envelope import request_id_of
from router.gateway import Gateway
from router.lists import Question
from router.relay import RelayResponse
from router.routes import OTHER, ROUTES


def control_routes(gateway: Gateway) -> APIRouter:
    """All of them; they come before the data routes, whose catch-all takes what is left."""
    router = APIRouter()
    _declare_models(router, gateway)
    _declare_lists(router, gateway)
    _declare_health(router, gateway)
    return router


def _declare_models(router: APIRouter, gateway: Gateway) -> None:
    catalogue = gateway.catalogue

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The union of what the healthy replicas serve, and which replicas serve each."""
        return {"object": "list", "data": catalogue.cards()}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model's card."""
        return catalogue.card(name)


def _declare_lists(router: APIRouter, gateway: Gateway) -> None:
    async def listed(request: Request) -> Any:
        """One list out of all replicas' lists; a pinned request gets that replica's alone."""
        if "x-kvroute-pin" in request.headers:
            return RelayResponse(gateway.relay, OTHER)
        question = Question.read(request.url.path, request.query_params.multi_items())
        headers = request.scope["headers"]
        return await gateway.lists.answer(question, headers, request_id_of(request.scope))

    for route in ROUTES:
        if route.listed:
            router.add_api_route(route.path, listed, methods=["GET"], response_model=None)


def _declare_health(router: APIRouter, gateway: Gateway) -> None:
    @router.head("/livez", include_in_schema=False)
    @router.get("/livez")
    async def livez() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """200 while at least one replica takes requests and the gateway is not draining."""
        ready = gateway.fleet.any_healthy() and not gateway.draining
        content = {
            "status": "ready" if ready else "not ready",
            "index": "available" if gateway.index.available else "unavailable",
            "replicas": gateway.replica_states(),
        }
        return JSONResponse(content, status_code=200 if ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        text = await asyncio.to_thread(generate_latest, gateway.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
