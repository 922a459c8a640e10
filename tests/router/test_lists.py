"""Lists of files and batches: one list out of all replicas' lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidRequest
from router.lists import Part, Question, united
from router.wire import MAX_ANSWER_BYTES
from tests.router.support import json_answer, running_gateway, scripted

FIRST_PAGE = "/v1/files?limit=100"


def file(name: str, made_at: int) -> dict[str, Any]:
    return {"id": name, "object": "file", "created_at": made_at}


def page(*objects: dict[str, Any], more: bool = False) -> bytes:
    return json_answer({"object": "list", "data": list(objects), "has_more": more})


def ids(listed: Any) -> list[str]:
    return [each["id"] for each in listed.json()["data"]]


async def test_a_list_has_the_files_of_all_replicas_newest_first() -> None:
    async with scripted(*[_unused] * 2) as (one, two):
        one.gets[FIRST_PAGE] = page(file("file-3", 30), file("file-2", 20), more=True)
        one.gets[FIRST_PAGE + "&after=file-2"] = page(file("file-0", 5))
        two.gets[FIRST_PAGE] = page(file("file-1", 25))
        async with running_gateway(one, two) as running:
            listed = await running.client.get("/v1/files")
            assert ids(listed) == ["file-3", "file-1", "file-2", "file-0"]
            assert listed.json()["has_more"] is False
            assert "kvroute_missing" not in listed.json()
            second = await running.client.get("/v1/files?limit=2&after=file-3")
            assert ids(second) == ["file-1", "file-2"]
            assert (second.json()["last_id"], second.json()["has_more"]) == ("file-2", True)
            upward = await running.client.get("/v1/files?order=asc&limit=1")
            assert ids(upward) == ["file-0"]


async def test_what_is_listed_can_be_asked_for() -> None:
    async with scripted(*[_unused] * 2) as replicas:
        for at, replica in enumerate(replicas):
            replica.gets["/v1/batches?limit=100"] = page(file(f"batch_{at}", at))
            replica.gets[f"/v1/batches/batch_{at}"] = json_answer({"id": f"batch_{at}", "at": at})
        async with running_gateway(*replicas) as running:
            unknown = await running.client.get("/v1/batches/batch_1")
            assert unknown.status_code == 404
            await running.client.get("/v1/batches")
            for at, replica in enumerate(replicas):
                found = await running.client.get(f"/v1/batches/batch_{at}")
                assert found.json()["at"] == at
                assert found.headers["x-kvroute-replica"] == replica.name


async def test_filters_and_headers_reach_the_replicas() -> None:
    async with scripted(_unused) as (replica,):
        replica.gets["/v1/files?purpose=batch%20x&limit=100"] = page(file("file-1", 1))
        async with running_gateway(replica) as running:
            assert ids(await running.client.get("/v1/files?purpose=batch+x")) == ["file-1"]


async def test_a_replica_that_cannot_be_asked_is_named() -> None:
    async with scripted(*[_unused] * 2) as (one, two):
        one.gets[FIRST_PAGE] = page(file("file-1", 1))
        two.gets[FIRST_PAGE] = json_answer({}, "500 Internal Server Error")
        async with running_gateway(one, two) as running:
            listed = await running.client.get("/v1/files")
            assert (listed.status_code, ids(listed)) == (200, ["file-1"])
            assert listed.json()["kvroute_missing"] == [two.name]
            one.gets[FIRST_PAGE] = b"nonsense\r\n\r\n"
            nobody = await running.client.get("/v1/files")
            assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_replica")


async def test_a_page_without_end_is_no_answer() -> None:
    async with scripted(*[_unused] * 2) as (one, two):
        one.gets[FIRST_PAGE] = page(file("file-1", 1))
        two.gets[FIRST_PAGE] = page(file("f" * (MAX_ANSWER_BYTES + 1), 2))
        async with running_gateway(one, two) as running:
            listed = await running.client.get("/v1/files")
            assert (listed.status_code, ids(listed)) == (200, ["file-1"])
            assert listed.json()["kvroute_missing"] == [two.name]


async def test_replicas_without_the_route_are_a_404_and_a_refusal_is_a_400() -> None:
    async with scripted(_unused) as (replica,):
        async with running_gateway(replica) as running:
            missing = await running.client.get("/v1/files")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            refused = json_answer({"error": {"message": "no such purpose"}}, "400 Bad Request")
            replica.gets[FIRST_PAGE] = refused
            bad = await running.client.get("/v1/files")
            assert bad.status_code == 400 and "no such purpose" in bad.text


async def test_a_pinned_list_is_that_replicas_own() -> None:
    async with scripted(*[_unused] * 2) as (one, two):
        one.gets["/v1/files"] = page(file("file-1", 1))
        two.gets["/v1/files"] = page(file("file-2", 2))
        async with running_gateway(one, two, allow_pin=True) as running:
            for replica, name in ((one, "file-1"), (two, "file-2")):
                pin = {"x-kvroute-pin": replica.name}
                assert ids(await running.client.get("/v1/files", headers=pin)) == [name]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "order=up", "after=file-9"])
async def test_odd_parameters_are_refused(query: str) -> None:
    async with scripted(_unused) as (replica,):
        replica.gets[FIRST_PAGE] = page(file("file-1", 1))
        async with running_gateway(replica) as running:
            answer = await running.client.get(f"/v1/files?{query}")
            assert answer.status_code == 400
            assert query.partition("=")[0] in answer.json()["error"]["message"]


@given(
    made=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30),
    limit=st.integers(1, 7),
    ascending=st.booleans(),
)
def test_pages_put_together_are_the_whole_list_once(
    made: list[tuple[int, int]], limit: int, ascending: bool
) -> None:
    objects = [(file(f"f{at}", when), owner) for at, (when, owner) in enumerate(made)]
    parts = [Part(str(r), [each for each, owner in objects if owner == r]) for r in range(4)]
    seen: list[dict[str, Any]] = []
    after, more = "", True
    while more:
        got = united(parts, Question("/v1/files", limit, after, ascending, ()))
        seen += got["data"]
        after, more = got["last_id"] or "", got["has_more"]
    times = [each["created_at"] for each in seen]
    assert times == sorted(times, reverse=not ascending)
    assert sorted(each["id"] for each in seen) == sorted(each["id"] for each, _ in objects)


def test_an_unknown_cursor_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="after"):
        united([Part("a", [])], Question("/v1/files", 1, "gone", False, ()))


async def _unused(seen: Any, reader: Any, writer: Any) -> None:
    raise AssertionError(f"{seen.method} {seen.target}")
