"""Which handler answers which method and path; a path may have `{}` where an id stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from loadgen.replica.errors import NoRoute
from loadgen.replica.http import Exchange

Handler = Callable[..., None]
"""Takes the exchange, and the ids of its path."""


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    handler: Handler


class Router:
    """Finds the handler of a request. Refuses what has none (404, 405) as FastAPI does."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Handler]]] = []
        patterns: dict[str, dict[str, Handler]] = {}
        for route in routes:
            table = patterns if "{}" in route.path else self._exact
            table.setdefault(route.path, {})[route.method] = route.handler
        for path, methods in patterns.items():
            expression = re.escape(path).replace(re.escape("{}"), "([^/]+)")
            self._patterns.append((re.compile(expression), methods))

    def route(self, exchange: Exchange) -> None:
        """Call the handler. Raises NoRoute, and what the handler raises."""
        methods, ids = self._find(exchange.request.path)
        handler = methods.get(exchange.request.method)
        if handler is None:
            raise NoRoute(", ".join(sorted(methods)))
        handler(exchange, *ids)

    def _find(self, path: str) -> tuple[dict[str, Handler], tuple[str, ...]]:
        methods = self._exact.get(path)
        if methods is not None:
            return methods, ()
        for pattern, found in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return found, match.groups()
        raise NoRoute
