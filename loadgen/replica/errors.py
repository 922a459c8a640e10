"""What can go wrong in a simulated replica.

ReplicaError
├── EngineError            misuse of the pure core
│   ├── RequestTooLong     can never fit the block cache
│   └── DuplicateRequest   an id that is still in flight
├── TokenizerError         the tokenizer folder cannot be used
└── RequestRefused         an HTTP error answer in vLLM's shape
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
