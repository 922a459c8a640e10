"""Everything the gateway can answer that is not a replica's answer.

KvrouteError
+-- ConfigError            the gateway cannot start as configured
+-- CommandError           a command cannot do what it is asked
+-- RequestError           answered to the client in OpenAI's error shape
|   +-- InvalidRequest     400
|   +-- BadToken           401
|   +-- AdminOff           403
|   +-- NotFound           404
|   +-- NoSuchReplica      404
|   +-- NoReceipt          404
|   +-- MethodNotAllowed   405
|   +-- ReplicaExists      409
|   +-- BadHttp            400  (these four are answered by the connection, before any route)
|   +-- HeadTimeout        408
|   +-- TargetTooLong      414
|   +-- HeadTooLarge       431
|   +-- ModelNotFound      404
|   +-- BodyTimeout        408
|   +-- BodyTooLarge       413
|   +-- UnsupportedEncoding 415
|   +-- Overloaded         503
|   +-- NoReplica          503
|   +-- RequestDropped     503
|   +-- AnswerCut          503
|   +-- TooManyConnections 503
|   +-- ShuttingDown       503
|   +-- ReplicaTimeout     504
+-- UpstreamError          a replica failed; may be tried elsewhere
|   +-- UpstreamUnavailable  nothing of the answer had arrived
|   +-- UpstreamCut          the answer had begun and broke off
+-- ClientGone             nobody is there to answer any more
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import orjson


class Shape(StrEnum):
    """Whose error objects a route's clients expect."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"
    """As OpenAI's, but that a stream's error event is one of its numbered events."""


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class KvrouteError(Exception):
    """Root of all errors raised by the gateway itself."""


class ConfigError(KvrouteError):
    """The configuration cannot be used; the message names the field."""


class CommandError(KvrouteError):
    """A command cannot do what it is asked; the message says why, and the exit code is 2."""


class RequestError(KvrouteError):
    """An answer of our own: status, OpenAI error type, code, and what to do about it."""

    status = 500
    type = "server_error"
    code = "internal_error"
    retry_after_s: int | None = None
    """When it is worth another try, where something is known of that."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What clients should know besides the body."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", b"%d" % self.retry_after_s)]

    def payload(self, shape: Shape = Shape.OPENAI, request_id: str = "") -> dict[str, Any]:
        """The body in the shape that the route's clients read."""
        if shape is Shape.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            error = {"type": kind, "message": self.message, "code": self.code}
            return {"type": "error", "error": error, "request_id": request_id}
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": {**fields, "request_id": request_id} if request_id else fields}

    def body(self, shape: Shape = Shape.OPENAI, request_id: str = "") -> bytes:
        """The JSON bytes of `payload`; a lone surrogate in a quoted name becomes `?`."""
        try:
            return orjson.dumps(self.payload(shape, request_id))
        except orjson.JSONEncodeError:
            self.message = self.message.encode("utf-8", "replace").decode()
            return orjson.dumps(self.payload(shape, request_id))

    def event(self, shape: Shape, request_id: str, number: int) -> bytes:
        """The server-sent event that ends a stream; `number` is its place among the events."""
        data = self.body(shape, request_id)
        if shape is Shape.RESPONSES:
            # Documented as flat, and sent nested by OpenAI, whose SDKs raise on `error` alone.
            error = self.payload(shape, request_id)["error"]
            flat = {"type": "error", "code": self.code, "message": self.message}
            numbered = {**flat, "param": self.param, "sequence_number": number}
            data = orjson.dumps({**numbered, "error": error})
        return b"event: error\ndata: %b\n\n" % data


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class BadHttp(RequestError):
    status = 400
    type = "invalid_request_error"
    code = "bad_http"


class HeadTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "head_timeout"


class TargetTooLong(RequestError):
    status = 414
    type = "invalid_request_error"
    code = "target_too_long"


class HeadTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class ModelNotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        listed = ", ".join(repr(name) for name in known) or "none yet"
        message = f"The model {model[:200]!r} is not served here. Available models: {listed}."
        super().__init__(message, param="model")


class PinRefused(RequestError):
    status = 403
    type = "invalid_request_error"
    code = "pin_refused"


class OwnerGone(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, where: str, allowed: str) -> None:
        super().__init__(f"{where}: this route takes {allowed or 'another method'}.")
        self._allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        """RFC 9110 15.5.6: which methods it takes."""
        return [(b"allow", self._allowed.encode())]


class BadToken(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_admin_token"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """RFC 9110 11.6.1: how to say who one is."""
        return [(b"www-authenticate", b"Bearer")]


class AdminOff(RequestError):
    status = 403
    type = "permission_error"
    code = "admin_disabled"


class NoSuchReplica(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "replica_not_found"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        listed = ", ".join(repr(each) for each in known) or "none"
        super().__init__(f"No replica is named {name[:200]!r}. Replicas: {listed}.", param="name")


class NoReceipt(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "receipt_not_found"

    def __init__(self, request_id: str, limit: int) -> None:
        if limit:
            message = (
                f"No receipt of the request {request_id[:128]!r}: this gateway keeps those of its "
                f"last {limit:,} requests (setting `receipts`). It may be older, or another "
                "gateway's; GET /admin/decisions lists what is kept."
            )
        else:
            message = "No receipts are kept here (setting `receipts` is 0)."
        super().__init__(message, param="request_id")


class ReplicaExists(RequestError):
    status = 409
    type = "invalid_request_error"
    code = "replica_exists"

    def __init__(self, name: str, url: str | None = None) -> None:
        if url is None:
            message = f"A replica named {name!r} exists already; remove it first, or give `name`."
        else:
            message = f"Replica {name!r} is at {url} already; remove it first."
        super().__init__(message, param="name" if url is None else "url")


class BodyTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedEncoding(RequestError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class Overloaded(RequestError):
    status = 503
    code = "gateway_overloaded"
    retry_after_s = 1


class NoReplica(RequestError):
    status = 503
    code = "no_replica"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestDropped(RequestError):
    """Replicas took this request and closed without an answer; `last` says what the last one did.

    Clients retry a 503 by themselves. This one may be the reason, or may have been carried out
    though nobody said so: those that can be told otherwise are (the openai and anthropic SDKs).
    """

    status = 503
    code = "request_dropped"

    def __init__(self, replicas: int, last: str) -> None:
        who = "The replica" if replicas == 1 else f"{replicas} replicas, one after the other,"
        super().__init__(
            f"{who} took this request and closed without an answer. {last}. "
            "It is not sent to another one."
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Not to be repeated without a thought."""
        return [(b"x-should-retry", b"false")]


class AnswerCut(RequestError):
    """An answer had begun and broke off; clients see it as a stream's error event."""

    status = 503
    code = "answer_cut"

    def __init__(self, reason: str) -> None:
        super().__init__(f"The replica's answer broke off: {reason}. Send it again.")


class TooManyConnections(RequestError):
    status = 503
    code = "too_many_connections"
    retry_after_s = 1


class ShuttingDown(RequestError):
    status = 503
    code = "gateway_shutting_down"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down; send the request again.")


class ReplicaTimeout(RequestError):
    status = 504
    code = "replica_timeout"


class UpstreamError(KvrouteError):
    """A replica did not answer as HTTP requires."""


class UpstreamUnavailable(UpstreamError):
    """Connecting failed, or the connection broke before a response head arrived."""


class UpstreamCut(UpstreamError):
    """The response had begun and ended before its end."""


class ClientGone(KvrouteError):
    """The client closed its connection before the answer was complete."""
