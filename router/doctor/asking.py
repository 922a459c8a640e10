"""Questions to a replica's HTTP routes, each with a deadline, and answers as plain values."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import orjson

from router.wire import read_answer


class NoAnswer(Exception):
    """Nothing came back in time, or nothing that is HTTP; the message says what."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `ahead_s`: by how much its date is ahead of our clock, None without a date.

    `ours`: a kvroute gateway gave it.
    """

    status: int
    body: bytes
    ahead_s: float | None
    ours: bool = False

    @property
    def ok(self) -> bool:
        """200."""
        return self.status == 200

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        """The body as JSON; None where it is not, and for every status but 200."""
        if not self.ok:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def complaint(self) -> str:
        """What an error answer says, in one line."""
        try:
            said = orjson.loads(self.body)
            said = said.get("error", said)
            said = said.get("message") or said.get("detail") if isinstance(said, dict) else said
        except (orjson.JSONDecodeError, AttributeError):
            said = self.text
        return f"{self.status} {' '.join(str(said).split())[:200]}".strip()


class Asker:
    """Asks one replica; one client serves many replicas."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, limit_s: float, headers: dict[str, str]
    ) -> None:
        self._client = client
        self._url = url
        self._limit_s = limit_s
        self._headers = headers

    async def get(self, path: str) -> Reply:
        """GET. Raises NoAnswer."""
        return await self._ask("GET", path, None, {}, self._limit_s)

    async def get_or_none(self, path: str) -> Reply | None:
        """GET of a route that the replica may lack, or be slow to answer."""
        try:
            return await self.get(path)
        except NoAnswer:
            return None

    async def post(
        self,
        path: str,
        fields: dict[str, Any],
        headers: dict[str, str] | None = None,
        limit_s: float | None = None,
    ) -> Reply:
        """POST of JSON. Raises NoAnswer."""
        given = {**(headers or {}), "content-type": "application/json"}
        return await self._ask("POST", path, orjson.dumps(fields), given, limit_s or self._limit_s)

    async def _ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], limit_s: float
    ) -> Reply:
        url = self._url + path
        sent = {**self._headers, **headers}
        try:
            async with asyncio.timeout(limit_s):
                began_s = time.time()
                async with self._client.stream(
                    method, url, content=body, headers=sent, timeout=limit_s
                ) as answer:
                    ahead_s = _ahead_s(answer.headers.get("date"), began_s, time.time())
                    try:
                        content = await read_answer(answer)
                    except ValueError:
                        raise NoAnswer(f"{method} {path}: the answer is too long") from None
                    ours = "x-kvroute-request-id" in answer.headers
                    return Reply(answer.status_code, content, ahead_s, ours)
        except (TimeoutError, httpx.TimeoutException):
            raise NoAnswer(f"{method} {path}: no answer within {limit_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer(f"{method} {path}: {reason}") from None


def _ahead_s(date: str | None, began_s: float, ended_s: float) -> float | None:
    """A date has whole seconds: what lies between its bounds and ours is no difference."""
    try:
        stamped_s = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    # It was written between `began_s` and `ended_s`, cut to a second, and may be cached for one.
    if stamped_s > ended_s:
        return stamped_s - ended_s
    return min(0.0, stamped_s + 2.0 - began_s)
