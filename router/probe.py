"""One question to a replica's control routes, over a lean connection of its own.

Probes share the data path's way to connect, so they fail as requests would, and hundreds of them a
second cost little. No connection is kept: one that the replica closes just then would look like
its death.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import orjson

from router.replicas import Replica
from router.upstream import request_head
from router.wire import MAX_ANSWER_BYTES

DOWN_CONNECT_S = 0.75
"""To a host that is gone packets vanish: do not wait for it past its return."""


class ProbeFailed(Exception):
    """A replica did not say that it is well; the message says what it did."""


class Answer(NamedTuple):
    """Status and body."""

    status: int
    body: bytes


async def ask(replica: Replica, path: str, limit_s: float) -> Answer:
    """GET within `limit_s` altogether. Raises TimeoutError, UpstreamError, ProbeFailed."""
    async with asyncio.timeout(limit_s):
        async with asyncio.timeout(None if replica.ready else DOWN_CONNECT_S):
            exchange = await replica.pool.acquire(fresh=True)
        try:
            headers = [(b"host", replica.netloc), (b"connection", b"close")]
            if replica.authorization is not None:
                headers.append((b"authorization", replica.authorization))
            target = replica.base_path + path.encode()
            await exchange.send(request_head(b"GET", target, headers, 0), b"", b"GET")
            head = await exchange.head(limit_s)
            body = bytearray()
            while part := await exchange.read(limit_s):
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise ProbeFailed(f"GET {path} answered too much")
            return Answer(head.status, bytes(body))
        finally:
            exchange.abort()


def refusal(replica: Replica, path: str, status: int) -> ProbeFailed:
    """What an answer other than 200 means, and what to do about it where that is known."""
    said = f"GET {path} answered {status}"
    if status not in (401, 403):
        return ProbeFailed(said)
    if replica.authorization is None:
        said += ": it wants an API key; set replica_api_key, or api_key of this replica"
    else:
        said += ": it does not take the API key it was given (replica_api_key, or its own api_key)"
    return ProbeFailed(said)


async def ask_json(replica: Replica, path: str, limit_s: float) -> Any:
    """A JSON answer with status 200. Raises as `ask` does."""
    answer = await ask(replica, path, limit_s)
    if answer.status != 200:
        raise refusal(replica, path, answer.status)
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise ProbeFailed(f"GET {path} did not answer with JSON") from None


async def ask_optional(replica: Replica, path: str, limit_s: float) -> Any:
    """A JSON answer; None where the route is missing or forbidden. Raises as `ask` does."""
    answer = await ask(replica, path, limit_s)
    if answer.status >= 500 and answer.status != 501:
        raise ProbeFailed(f"GET {path} answered {answer.status}")
    if answer.status != 200:
        return None
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
