"""The access log: one JSON line for each request, whoever served it."""

from __future__ import annotations

import logging

import orjson

logger = logging.getLogger("kvroute.access")

MAX_PATH = 256
"""Characters told of a path; a longer one is a client's own invention."""


def tell(
    request_id: bytes, method: str, path: str, status: int, seconds: float, **more: object
) -> None:
    """Write the line of one request; `more` are fields that only some have."""
    line = {
        "request_id": request_id.decode(),
        "method": method,
        # A lone surrogate has no form in JSON.
        "path": path[:MAX_PATH].encode("utf-8", "replace").decode(),
        "status": status,
        "seconds": round(seconds, 6),
        **more,
    }
    logger.info(orjson.dumps(line).decode())
