"""Lists of objects that replicas keep: one list out of all of theirs.

Each replica lists what it has made itself. The union is sorted and cut here, because a page of a
part is not a part of a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import orjson

from router.errors import InvalidRequest, NoReplica, NotFound
from router.owners import Owners
from router.replicas import Fleet, Replica
from router.upstream import Headers
from router.wire import forwarded, read_answer, upstream_headers

LIST_TIMEOUT_S = 10.0
PAGE_OBJECTS = 100
MAX_OBJECTS = 10_000
"""Of one replica; it is what OpenAI gives as the most files of one page."""
LEARNED_OBJECTS = 1000
LEARN_S = 0.5
_OWN = frozenset({b"accept-encoding"})


class Question(NamedTuple):
    """Which part of a list is wanted. `filters` are passed on as they are."""

    path: str
    limit: int
    after: str
    ascending: bool
    filters: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: str, query: Sequence[tuple[str, str]]) -> Question:
        """OpenAI's parameters of a list. Raises InvalidRequest."""
        given = dict(query)
        text = given.get("limit", str(PAGE_OBJECTS))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_OBJECTS):
            message = f"`limit` must be a whole number from 1 to {MAX_OBJECTS}."
            raise InvalidRequest(message, param="limit")
        order = given.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("`order` must be asc or desc.", param="order")
        kept = tuple(pair for pair in query if pair[0] not in ("limit", "order", "after"))
        return cls(path, int(text), given.get("after", ""), order == "asc", kept)


class Part(NamedTuple):
    """What one replica said: its objects, or None where it does not know the route."""

    replica: str
    objects: list[dict[str, Any]] | None


class ObjectLists:
    """Asks all replicas and unites their answers."""

    def __init__(self, fleet: Fleet, owners: Owners) -> None:
        self._fleet = fleet
        self._owners = owners
        self._client = httpx.AsyncClient(trust_env=False, timeout=LIST_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections to replicas."""
        await self._client.aclose()

    async def answer(self, question: Question, headers: Headers, request_id: str) -> dict[str, Any]:
        """The list, with `kvroute_missing` naming replicas that could not be asked.

        Owners of what is listed are remembered: a list finds objects again that a gateway
        without its Redis has forgotten. Raises NoReplica, NotFound, InvalidRequest.
        """
        replicas = self._fleet.taking()
        if not replicas:
            raise NoReplica("No replica can take this request now; GET /readyz says why.")
        asked = [self._part(each, question, headers, request_id) for each in replicas]
        results = await asyncio.gather(*asked, return_exceptions=True)
        if refusals := [each for each in results if isinstance(each, InvalidRequest)]:
            raise refusals[0]
        parts = [each for each in results if isinstance(each, Part)]
        missing = set(self._fleet.replicas) - {part.replica for part in parts}
        known = [part for part in parts if part.objects is not None]
        if not parts:
            raise NoReplica(f"No replica answered GET {question.path}. Try again.")
        if not known:
            raise NotFound(f"GET {question.path}: the replicas do not serve this route.")
        page = united(known, question)
        await self._learn(known, page["data"])
        return {**page, "kvroute_missing": sorted(missing)} if missing else page

    async def _part(
        self, replica: Replica, question: Question, headers: Headers, request_id: str
    ) -> Part:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            objects: list[dict[str, Any]] = []
            after = ""
            while len(objects) < MAX_OBJECTS:
                listed = await self._page(replica, question, after, headers, request_id)
                if listed is None:
                    return Part(replica.name, None)
                data = [each for each in listed["data"] if isinstance(each.get("id"), str)]
                objects += data
                if not listed.get("has_more") or not data or data[-1]["id"] == after:
                    break
                after = data[-1]["id"]
            return Part(replica.name, objects)

    async def _page(
        self, replica: Replica, question: Question, after: str, headers: Headers, request_id: str
    ) -> dict[str, Any] | None:
        """One page of a replica's own list; None where it has no such route."""
        asked = [*question.filters, ("limit", str(PAGE_OBJECTS))]
        asked += [("after", after)] if after else []
        query = "&".join(f"{quote(name, '')}={quote(value, '')}" for name, value in asked)
        sent = upstream_headers(headers, replica.netloc, request_id.encode(), None)
        url = f"{replica.url}{question.path}?{query}"
        async with self._client.stream("GET", url, headers=forwarded(sent, _OWN)) as answer:
            if answer.status_code in (404, 405, 501):
                return None
            content = await read_answer(answer)
        if answer.status_code in (400, 422):
            text = content[:300].decode("utf-8", "replace")
            raise InvalidRequest(f"Replica {replica.name!r} refused the list: {text}")
        answer.raise_for_status()
        listed = orjson.loads(content)
        return {**listed, "data": [each for each in listed["data"] if isinstance(each, dict)]}

    async def _learn(self, parts: Sequence[Part], page: Sequence[dict[str, Any]]) -> None:
        shown = {each["id"] for each in page[:LEARNED_OBJECTS]}
        with suppress(TimeoutError):
            async with asyncio.timeout(LEARN_S):
                for part in parts:
                    for each in part.objects or ():
                        if each["id"] in shown:
                            await self._owners.put(each["id"], part.replica)


def united(parts: Sequence[Part], question: Question) -> dict[str, Any]:
    """One page of the union, in OpenAI's form. Raises InvalidRequest for an unknown `after`."""
    found = {each["id"]: each for part in parts for each in part.objects or ()}
    # Several are made within a second: the id keeps the order of pages fixed.
    objects = sorted(found.values(), key=_made_at, reverse=not question.ascending)
    start = 0
    if question.after:
        ids = [each["id"] for each in objects]
        if question.after not in ids:
            message = f"`after`: no object {question.after[:200]!r} in this list."
            raise InvalidRequest(message, param="after")
        start = ids.index(question.after) + 1
    page = objects[start : start + question.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + question.limit < len(objects),
    }


def _made_at(listed: dict[str, Any]) -> tuple[float, str]:
    made = listed.get("created_at")
    return (float(made) if isinstance(made, int | float) else 0.0, listed["id"])
