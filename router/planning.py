"""What is to be done with a request: which replicas may serve it, what is sent, what is known.

Everything that can be refused is refused here, before a replica is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from router.call import Call
from router.catalogue import Catalogue
from router.config import Settings
from router.engines import EngineKind
from router.errors import InvalidRequest, NoReplica, OwnerGone, PinRefused
from router.identify import Identifier
from router.owners import Owners
from router.placement import (
    BYTES_PER_TOKEN_GUESS,
    NO_MATCH,
    Match,
    Placer,
    Prompt,
    RootMatch,
    Trusts,
)
from router.prompt import Request, load_object, parse_request
from router.replicas import Fleet, Replica
from router.routes import Kind
from router.splice import splice
from router.upload import GATHER_S, Upload, read_form
from router.wire import header, read_body

OWNING_FIELDS = ("previous_response_id", "input_file_id")
"""Fields that name an object another request has made: the request belongs with its owner."""
MAX_MODEL = 200
"""Characters kept of the model that a refused request asked for; it may be anything."""


FORM_BYTES_PER_TOKEN = 512
"""Speech is no text: an engine makes some 50 positions of a second, which is 16 to 32 kB of it."""


class Pin(NamedTuple):
    """The replica, and perhaps the rank, that a request insists on, and by what."""

    replica: str
    rank: int | None
    reason: str


class Plan(NamedTuple):
    """A request that can be sent. `only` names the one replica it belongs to, and `reason` why."""

    model: str | None
    body: bytes
    upload: Upload | None
    prompt: Prompt
    matched: Mapping[tuple[str, int], int]
    roots: Sequence[RootMatch]
    trust: Trusts
    chains: Sequence[bytes]
    streaming: bool
    repeatable: bool
    only: str | None
    rank: int | None
    reason: str
    generates: bool


class Planner:
    """Reads a request and plans it. One method per kind of route."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        catalogue: Catalogue,
        placer: Placer,
        identifier: Identifier,
        owners: Owners,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._catalogue = catalogue
        self._placer = placer
        self._identifier = identifier
        self._owners = owners

    async def plan(self, call: Call, arrived: Callable[[Call], None]) -> Plan:
        """The plan of a request whose body is read here; `arrived` is called once it is.

        Nothing is counted by it. Raises RequestError, ClientGone.
        """
        if any(part in (".", "..") for part in call.path.split("/")):
            raise InvalidRequest("The path has a dot segment; name the resource itself.")
        route = call.route
        limit = self._settings.max_body_bytes
        if route.kind is Kind.UPLOAD and call.method == "POST":
            gather_s = min(GATHER_S, self._settings.body_timeout_s / 4)
            upload = await read_form(call.headers, call.receive, max_bytes=limit, gather_s=gather_s)
            arrived(call)
            return await self._plan_upload(call, upload)
        body = await read_body(call.headers, call.receive, max_bytes=limit)
        arrived(call)
        if route.kind is Kind.GENERATE:
            return await self._plan_generation(call, body)
        return await self._plan_other(call, body)

    def count(self, plan: Plan) -> None:
        """Count what a plan that is carried out asks for."""
        if plan.generates:
            self._identifier.count(plan.prompt)

    async def _plan_generation(self, call: Call, body: bytes) -> Plan:
        request = parse_request(call.path, body)
        request, body = self._resolve(request, body)
        call.model = request.model[:MAX_MODEL]
        only = await self._insisted(call, request.fields)
        replicas = self.candidates(request.model, only.replica if only else None)
        call.watch()
        asked = self._identifier.identify(request, replicas, call.headers, len(body))
        prompt = await call.unless_gone(asked)
        matched = self._placer.match(prompt, replicas)
        return self._made(call, request.model, body, only, prompt, matched, request.stream)

    async def _plan_other(self, call: Call, body: bytes) -> Plan:
        fields = _fields(call, body)
        model = fields.get("model")
        if call.route.kind is Kind.MODEL and model is not None and not isinstance(model, str):
            raise InvalidRequest("`model` must be a string.", param="model")
        named = model if isinstance(model, str) and model else None
        if named is not None:
            request = Request(call.path, named, fields.get("stream") is True, "", fields)
            request, body = self._resolve(request, body)
            named = request.model
            call.model = named[:MAX_MODEL]
        only = await self._insisted(call, fields)
        if call.route.kind is Kind.OTHER and named is not None and not self._fleet.known(named):
            named = None  # a field of that name may mean something else on a route we do not know
        only = only or self._of_kind(named, call.route.engine)
        self.candidates(named, only.replica if only else None)
        call.watch()
        streaming = fields.get("stream") is True
        return self._made(call, named, body, only, None, NO_MATCH, streaming)

    def _of_kind(self, model: str | None, kind: EngineKind | None) -> Pin | None:
        """A replica that knows a route of one engine's own; None where the fleet has none."""
        if kind is None:
            return None
        found = [each for each in self._fleet.serving(model) if each.kind is kind]
        if not found:
            return None
        least = min(found, key=lambda each: each.inflight.running)
        return Pin(least.name, None, f"a route of {kind}")

    async def _plan_upload(self, call: Call, upload: Upload) -> Plan:
        model = upload.model
        call.model = model[:MAX_MODEL] if model is not None else None
        if model is not None and self._catalogue.target(model) is not None:
            message = f"{model!r} is an alias, which forms cannot use; name the model itself."
            raise InvalidRequest(message, param="model")
        if model is None and not call.route.makes:
            raise InvalidRequest("The form field `model` is required.", param="model")
        only = await self._insisted(call, {})
        self.candidates(model, only.replica if only else None)
        if upload.complete:
            call.watch()
        guessed = Prompt(model or "", "", None, len(upload.buffered) // FORM_BYTES_PER_TOKEN)
        plan = self._made(call, model, upload.buffered, only, guessed, NO_MATCH, False)
        repeatable = plan.repeatable and upload.complete
        return plan._replace(upload=upload, repeatable=repeatable, generates=False)

    def _made(
        self,
        call: Call,
        model: str | None,
        body: bytes,
        only: Pin | None,
        prompt: Prompt | None,
        matched: Match,
        streaming: bool,
    ) -> Plan:
        guessed = Prompt(model or "", "", None, len(body) // BYTES_PER_TOKEN_GUESS)
        return Plan(
            model=model,
            body=body,
            upload=None,
            prompt=prompt or guessed,
            matched=matched[0],
            roots=matched[1],
            trust=matched[2],
            chains=matched[3],
            streaming=streaming,
            repeatable=call.route.repeatable or call.method == "GET",
            only=only.replica if only else None,
            rank=only.rank if only else None,
            reason=only.reason if only else "",
            generates=prompt is not None,
        )

    def _resolve(self, request: Request, body: bytes) -> tuple[Request, bytes]:
        """An alias becomes the model it stands for, in the bytes too."""
        target = self._catalogue.target(request.model)
        if target is None:
            return request, body
        return request._replace(model=target), splice(body, {"model": orjson.dumps(target)})

    def candidates(
        self, model: str | None, only: str | None, tried: frozenset[str] = frozenset()
    ) -> Sequence[Replica]:
        """Replicas that may be sent this request now. Raises ModelNotFound, NoReplica."""
        found = self._fleet.serving(model, without=tried, only=only)
        if found:
            return found
        if model is not None:
            self._catalogue.check(model)
            self._check_serves(only, model)
        where = f"Replica {only!r}" if only is not None else "No replica"
        can = "cannot" if only is not None else "can"
        message = f"{where} {can} take this request now; GET /readyz says why. Try again."
        raise NoReplica(message, retry_after_s=self._fleet.retry_after_s(model, only))

    def _check_serves(self, only: str | None, model: str) -> None:
        """Another try does not help where the one replica that is meant serves other models.

        Raises InvalidRequest. What a replica that is down will serve is not known.
        """
        replica = self._fleet.replicas.get(only) if only is not None else None
        if replica is None or replica.state == "down" or not replica.models:
            return
        if model not in replica.models:
            served = ", ".join(sorted(map(repr, replica.models)))
            message = f"This request belongs to replica {only!r}, which serves {served} only."
            raise InvalidRequest(f"{message} Name such a model.", param="model")

    def others(self, model: str | None, name: str) -> bool:
        """Whether a replica other than `name` can take a request for this model now."""
        found = self._fleet.serving(model, without=frozenset((name,)))
        return bool(found)

    async def _insisted(self, call: Call, fields: Mapping[str, Any]) -> Pin | None:
        """The replica this request must go to: pinned, or the owner of what it names."""
        pin = header(call.headers, b"x-kvroute-pin")
        if pin is not None:
            return self._pinned(pin.decode("latin-1"))
        if call.object_id is not None:
            return Pin(await self._owner(call.object_id), None, "it keeps the object")
        for name in OWNING_FIELDS:
            value = fields.get(name)
            if isinstance(value, str) and value and call.route.makes:
                return Pin(await self._owner(value, name), None, f"it keeps the {name}")
        return None

    def _pinned(self, value: str) -> Pin:
        if not self._settings.allow_pin:
            message = "x-kvroute-pin is not allowed here; the setting `allow_pin` allows it."
            raise PinRefused(message)
        name, rank = value, None
        if name not in self._fleet.replicas and "/" in value:
            name, _, text = value.rpartition("/")
            rank = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        replica = self._fleet.replicas.get(name)
        if replica is None or (rank is not None and rank not in replica.ranks):
            known = ", ".join(sorted(self._fleet.replicas)) or "none"
            message = f"x-kvroute-pin: no replica or rank {value[:200]!r}. Replicas: {known}."
            raise InvalidRequest(message, param="x-kvroute-pin")
        return Pin(name, rank, "pinned by x-kvroute-pin")

    async def _owner(self, object_id: str, param: str | None = None) -> str:
        """Where an object is. Raises OwnerGone."""
        owner = await self._owners.of(object_id)
        if owner is None and len(self._fleet.replicas) == 1:
            return next(iter(self._fleet.replicas))  # nobody else can have it
        if owner is None or owner not in self._fleet.replicas:
            gone = "its replica is gone" if owner else "no replica is known to keep it"
            message = f"{object_id[:200]!r} cannot be found: {gone}. Create it again."
            raise OwnerGone(message, param=param)
        return owner


def _fields(call: Call, body: bytes) -> dict[str, Any]:
    """A JSON object's fields. Only routes that must have one refuse anything else."""
    if call.route.kind is Kind.MODEL:
        return load_object(body)
    kind = header(call.headers, b"content-type") or b""
    if not body or b"json" not in kind:
        return {}
    try:
        return load_object(body)
    except InvalidRequest:
        return {}
