"""GET /admin/status: everything one looks for first when something is odd, in one answer."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends

from router.admin import guard
from router.config import Settings
from router.gateway import Gateway


def status_routes(gateway: Gateway) -> APIRouter:
    """The route, guarded as all of /admin is."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(guard(gateway.settings))])

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """Version, replicas, trust in their events, the index, what the doctor finds, settings."""
        url = gateway.index.redis_url
        return {
            "version": our_version(),
            "ready": gateway.fleet.any_healthy() and not gateway.draining,
            "draining": gateway.draining,
            "replicas": gateway.replica_states(),
            "sources": [
                {**asdict(each), "trust": str(each.trust)} for each in gateway.index.sources()
            ],
            "index": {
                "available": gateway.index.available,
                "redis_url": url and without_password(url),
            },
            "doctor": gateway.doctor.describe(),
            "settings": shown_settings(gateway.settings),
        }

    return router


def our_version() -> str:
    """Of the installed package."""
    try:
        return version("kvroute")
    except PackageNotFoundError:
        return "unknown"


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Every setting; secrets are stars, and so is a password in a URL."""
    shown: dict[str, Any] = settings.model_dump(mode="json")
    if settings.redis_url is not None:
        shown["redis_url"] = without_password(settings.redis_url)
    return shown


def without_password(url: str) -> str:
    """A URL whose password, also one given as a parameter, cannot be read."""
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query.lower():
        return url
    netloc = parts.netloc
    if parts.password is not None:
        user, _, host = netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:***@{host}"
    query = "&".join(
        "password=***" if each.lower().startswith("password=") else each
        for each in parts.query.split("&")
    )
    return parts._replace(netloc=netloc, query=query).geturl()
