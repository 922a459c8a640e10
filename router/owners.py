"""Which replica keeps an object: a response, a file, a batch. Shared by gateways through Redis."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

logger = logging.getLogger("kvroute.owners")

REMEMBERED = 10_000
"""Owners kept in memory, least recently used first out; Redis has them all."""
DEADLINE_S = 0.1
TTL_S = 7 * 24 * 3600
MADE_FIELDS = ("id", "output_file_id", "error_file_id")
"""An object's own id, and the files that a batch has made."""
_ID = "[A-Za-z0-9_.:-]{1,128}"
_USABLE = re.compile(_ID)
_FIRST_ID = re.compile(f'"id"\\s*:\\s*"({_ID})"'.encode())


def object_ids(chunk: bytes) -> list[str]:
    """Ids of the objects that an answer tells of, from its first bytes.

    Of a whole object only its own fields count: metadata are the client's and may say anything.
    """
    try:
        fields = orjson.loads(chunk)
    except orjson.JSONDecodeError:
        found = _FIRST_ID.search(chunk)
        return [found.group(1).decode()] if found else []
    named = [fields.get(name) for name in MADE_FIELDS] if isinstance(fields, dict) else []
    return [each for each in named if isinstance(each, str) and _USABLE.fullmatch(each)]


class Owners:
    """Object id to replica name. Without Redis only this gateway's own memory answers."""

    def __init__(self, redis_url: Callable[[], str | None], namespace: str = "kvroute") -> None:
        self._redis_url = redis_url
        self._prefix = f"{namespace}:owner:"
        self._client: Any = None
        self._known: OrderedDict[str, str] = OrderedDict()

    async def close(self) -> None:
        """Close the connection to Redis."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def of(self, name: str) -> str | None:
        """The replica that keeps an object, or None where nobody is known to."""
        found = self._known.get(name)
        if found is not None:
            self._known.move_to_end(name)
            return found
        value = await self._ask("GET", self._prefix + name)
        if value is None:
            return None
        self._remember(name, value.decode())
        return self._known[name]

    async def put(self, name: str, replica: str) -> None:
        """Remember an owner. Never raises; Redis gets at most `DEADLINE_S`."""
        if self._known.get(name) != replica:
            self._remember(name, replica)
            await self._ask("SET", self._prefix + name, replica, "EX", TTL_S)

    def _remember(self, name: str, replica: str) -> None:
        self._known[name] = replica
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def _ask(self, *command: object) -> bytes | None:
        url = self._redis_url()
        if url is None:
            return None
        if self._client is None:
            self._client = Redis.from_url(url, socket_connect_timeout=DEADLINE_S)
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._client.execute_command(*command)
        except UnicodeEncodeError:
            return None  # a lone surrogate: no object has such a name
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("owner of an object: Redis did not answer: %s", error)
            return None
        return answer if isinstance(answer, bytes) else None
