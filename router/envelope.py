"""What holds for every answer that is not the relay's: a request id, an account, an error's shape.

The relay does the same for what it serves, without the framework's cost.
"""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import access
from router.errors import InvalidRequest, MethodNotAllowed, NotFound, RequestError, Shape
from router.metrics import Metrics
from router.relay import RELAYED_KEY
from router.wire import request_id

REQUEST_ID_KEY = "kvroute.request_id"
QUIET = frozenset({"/livez", "/readyz", "/metrics"})
"""Asked every few seconds by machines: counted, but not in the access log."""
ANTHROPIC_PREFIX = "/v1/messages"


def request_id_of(scope: Scope) -> str:
    """The id under which a request is answered."""
    found: bytes = scope[REQUEST_ID_KEY]
    return found.decode()


class Envelope:
    """An ASGI application around the framework's."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID_KEY] = chosen = request_id(scope["headers"])
        began_s = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and RELAYED_KEY not in scope:
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-kvroute-request-id", chosen)]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if RELAYED_KEY not in scope:
                self._account(scope, status, time.perf_counter() - began_s)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.requests.add(1, route, str(status))
        if self._access_log and route not in QUIET:
            access.tell(scope[REQUEST_ID_KEY], scope["method"], scope["path"], status, seconds)


def declare_errors(app: FastAPI) -> None:
    """Whatever goes wrong in the framework answers in the shape that the path's clients read."""

    async def routing(request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.url.path}"
        if getattr(error, "status_code", 404) == 405:
            allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
            return _answer(request, MethodNotAllowed(where, allowed))
        return _answer(request, NotFound(f"{where}: no such route. GET /docs lists the routes."))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        message = f"{where or 'The request'}: {first['msg']}."
        return _answer(request, InvalidRequest(message, param=where))

    async def own(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return _answer(request, error)

    async def unforeseen(request: Request, error: Exception) -> Response:
        return _answer(request, RequestError("The gateway failed; the log says why."))

    for status in (404, 405):
        app.add_exception_handler(status, routing)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(RequestError, own)
    app.add_exception_handler(Exception, unforeseen)


def _answer(request: Request, error: RequestError) -> Response:
    anthropic = request.url.path.startswith(ANTHROPIC_PREFIX)
    shape = Shape.ANTHROPIC if anthropic else Shape.OPENAI
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    body = error.body(shape, request_id_of(request.scope))
    return Response(body, error.status, headers, "application/json")
