"""What the gateway would do with a request now: planned, matched and chosen, and then not sent.

It takes the same steps as a request up to its placement. No load is placed, no turn is taken,
nothing is learned or counted. Only a prompt that a replica has to tokenize is shown to it, because
no decision could be foretold otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from cache_index.types import SourceStatus
from router.call import Call
from router.config import Settings
from router.dispatch import first_choices
from router.errors import BodyTimeout, InvalidRequest
from router.placement import Placer
from router.planning import Plan, Planner
from router.receipt import Json, explanation
from router.receipts import Receipts
from router.replicas import Fleet, Replica
from router.routes import ROUTES, Kind, Route
from router.upstream import Headers
from router.wire import Message, Receive, Scope

CLIENT_AUTHORIZATION = b"x-kvroute-client-authorization"
"""The Authorization that the request itself would carry: the header proper is the admin's."""


class Explainer:
    """Answers `POST /admin/explain`."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        planner: Planner,
        placer: Placer,
        receipts: Receipts,
        sources: Callable[[], Sequence[SourceStatus]],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._planner = planner
        self._placer = placer
        self._receipts = receipts
        self._sources = sources

    async def explain(self, path: str, scope: Scope, receive: Receive) -> Json:
        """What would be done with the body that arrives, if it came to `path`.

        Raises RequestError as the request itself would, ClientGone.
        """
        loop = asyncio.get_running_loop()
        call = Call(_route(path), _as_sent(scope, path), receive, _unsent, loop)
        try:
            plan = await self._plan(call)
            replicas = self._planner.candidates(plan.model, plan.only)
            choices = first_choices(plan, replicas)
            call.on_trial = choices is not replicas
            call.placement = self._placer.preview(plan.prompt, choices, plan.matched, plan.rank)
            kept = self._receipts.kept(call, running=False)
        finally:
            call.unwatch()
        left_out = self._left_out(plan, choices)
        trust = {(each.replica, each.rank): str(each.trust) for each in self._sources()}
        settings = self._settings
        return explanation(kept, settings.policy, settings.base_unit_tokens, left_out, trust)

    async def _plan(self, call: Call) -> Plan:
        limit_s = self._settings.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                call.plan = await self._planner.plan(call, _arrived)
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {limit_s:g} s.") from None
        return call.plan

    def _left_out(self, plan: Plan, choices: Collection[Replica]) -> dict[str, str]:
        """Replicas that are no candidates, and why."""
        return {
            replica.name: _why_not(replica, plan)
            for replica in self._fleet.replicas.values()
            if replica not in choices
        }


def _why_not(replica: Replica, plan: Plan) -> str:
    if plan.only is not None and replica.name != plan.only:
        return f"the request belongs to {plan.only}: {plan.reason}"
    if plan.model is not None and replica.models and plan.model not in replica.models:
        return f"it does not serve {plan.model!r}"
    return replica.explanation() or "others come first: one of them waits for its trial request"


def _route(path: str) -> Route:
    """Raises InvalidRequest for a path whose decisions do not depend on a JSON body."""
    explained = {each.path: each for each in ROUTES if each.kind in (Kind.GENERATE, Kind.MODEL)}
    route = explained.get(path.rstrip("/"))
    if route is None:
        known = ", ".join(explained)
        raise InvalidRequest(f"No explanations for {path[:200]!r}; known: {known}.", param="path")
    return route


def _as_sent(scope: Scope, path: str) -> Scope:
    """The request in place of the question about it; the admin's token is not for replicas."""
    headers: Headers = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
    headers = [
        (b"authorization" if name == CLIENT_AUTHORIZATION else name, value)
        for name, value in headers
    ]
    target = {"path": path, "raw_path": path.encode(), "query_string": b"", "path_params": {}}
    return {**scope, **target, "headers": headers}


def _arrived(call: Call) -> None:
    call.arrived_at_s = time.perf_counter()


async def _unsent(message: Message) -> None:
    raise AssertionError("an explanation is not an answer")
