"""Routes under /admin: replicas join, leave, drain. Guarded by the setting `admin_token`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError

from router.config import ReplicaConfig, Settings
from router.errors import AdminOff, BadToken, InvalidRequest, NoSuchReplica, ReplicaExists
from router.replicas import Fleet, Replica
from router.wire import read_body

MAX_BODY_BYTES = 64 << 10


def admin_routes(
    settings: Settings, fleet: Fleet, make: Callable[[ReplicaConfig], Replica]
) -> APIRouter:
    """The routes; `make` makes a replica that has not been probed yet."""
    router = APIRouter(prefix="/admin/replicas", dependencies=[Depends(guard(settings))])

    def named(name: str) -> Replica:
        replica = fleet.replicas.get(name)
        if replica is None:
            raise NoSuchReplica(name, sorted(fleet.replicas))
        return replica

    @router.get("")
    async def list_replicas() -> dict[str, Any]:
        """Every replica's state."""
        fleet.refresh()
        return {"replicas": {each.name: each.describe() for each in fleet.replicas.values()}}

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def add_replica(request: Request) -> dict[str, Any]:
        """A replica joins and is probed at once; it gets requests when it is found well."""
        config = await _read_config(request, settings)
        if config.name in fleet.replicas:
            raise ReplicaExists(config.name)
        for each in fleet.replicas.values():
            if each.url == config.url:  # two names would count its load and its cache twice
                raise ReplicaExists(each.name, each.url)
        replica = make(config)
        fleet.add(replica)
        return _state(replica)

    @router.post("/{name:path}/drain")
    async def drain_replica(name: str) -> dict[str, Any]:
        """No new requests; those that run go on."""
        replica = named(name)
        fleet.drain(replica)
        return _state(replica)

    @router.post("/{name:path}/undrain")
    async def undrain_replica(name: str) -> dict[str, Any]:
        """Takes requests again; a removal that waits for running requests is taken back."""
        replica = named(name)
        fleet.undrain(replica)
        return _state(replica)

    @router.delete("/{name:path}")
    async def remove_replica(name: str, force: bool = False) -> dict[str, Any]:
        """Drained, and gone with its last request; `force`: gone now, running requests end."""
        replica = named(name)
        fleet.remove(replica, force=force)
        gone = fleet.replicas.get(name) is not replica
        return {**_state(replica), "removed": gone}

    return router


_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": ReplicaConfig.model_json_schema(
                    ref_template="#/components/schemas/{model}"
                )
            }
        },
    }
}


def _state(replica: Replica) -> dict[str, Any]:
    return {"name": replica.name, **replica.describe()}


def guard(settings: Settings) -> Callable[[Request], Awaitable[None]]:
    """Lets a request pass that carries the admin token. Raises AdminOff, BadToken."""

    async def check(request: Request) -> None:
        if settings.admin_token is None:
            raise AdminOff("The /admin routes are off; the setting `admin_token` enables them.")
        given = request.headers.get("authorization", "").encode("latin-1")
        wanted = f"Bearer {settings.admin_token.get_secret_value()}".encode()
        if not compare_digest(given, wanted):
            raise BadToken("Send `Authorization: Bearer` with the gateway's admin_token.")

    return check


async def _read_config(request: Request, settings: Settings) -> ReplicaConfig:
    """The new replica. Raises InvalidRequest, which names the field."""
    body = await read_body(request.scope["headers"], request.receive, max_bytes=MAX_BODY_BYTES)
    try:
        config = ReplicaConfig.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field or 'body'}: {message}.", param=field) from None
    if config.by_dns:
        message = "url: a dns+http name belongs in the setting `replicas`; add http addresses here."
        raise InvalidRequest(message, param="url")
    if config.dials and settings.kv_events_bind is None:
        message = (
            "kv_events: without `endpoint` its engine dials us, but kv_events_bind is not set."
        )
        raise InvalidRequest(message, param="kv_events")
    return config
