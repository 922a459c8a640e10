"""What can go wrong in a simulated replica.

ReplicaError
├── EngineError            misuse of the pure core
│   ├── RequestTooLong     can never fit the block cache
│   └── DuplicateRequest   an id that is still in flight
├── TokenizerError         the tokenizer folder cannot be used
└── RequestRefused         an HTTP error answer in vLLM's shape
    ├── InvalidValue       by vLLM's own checks: its text names the parameter and its value
    ├── InvalidBody        by the web framework: the body does not fit the route's schema
    └── NoRoute            by the web framework: nothing answers this path, or this method
"""

from __future__ import annotations


class ReplicaError(Exception):
    """Base of every error this package raises."""


class EngineError(ReplicaError):
    """The engine core refused an operation."""


class RequestTooLong(EngineError):
    """Prompt and reply together exceed the tokens the block cache can hold."""


class DuplicateRequest(EngineError):
    """The id belongs to a request that has not finished."""


class TokenizerError(ReplicaError):
    """The tokenizer folder lacks something or a template failed."""


class RequestRefused(ReplicaError):
    """An HTTP error answer: status, message, vLLM's error type and the offending field."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class InvalidValue(RequestRefused):
    """A value that vLLM itself checks; its messages end with what they are about."""

    def __init__(self, message: str, param: str, value: object = None) -> None:
        about = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
        super().__init__(f"{message} ({about})", param=param)


class InvalidBody(RequestRefused):
    """A body or a query that does not fit its schema; told in one shape on all routes."""

    def __init__(self, place: str, message: str) -> None:
        report = f"1 validation error:\n  {{'loc': {place!r}, 'msg': {message!r}}}"
        super().__init__(report, kind="Bad Request", param=place)


class NoRoute(RequestRefused):
    """404, or 405 with the methods that there are."""

    def __init__(self, methods: str = "") -> None:
        message, status = ("Method Not Allowed", 405) if methods else ("Not Found", 404)
        super().__init__(message, status=status, kind=message)
        self.methods = methods
