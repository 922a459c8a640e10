"""Objects that a replica keeps: found through every gateway, and missed clearly when it is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache_index.embedded import EmbeddedServer
from tests.chaos.fleet import ChaosFleet, OneReplica, chaos_fleet
from tests.whole import start_gateway, tokenizer_options

pytestmark = pytest.mark.slow

ADMIN = {"authorization": "Bearer t"}
LINE = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "sim-model", "messages": [{"role": "user", "content": "hi"}]},
}
FORM: dict[str, Any] = {
    "files": {"file": ("in.jsonl", json.dumps(LINE).encode())},
    "data": {"purpose": "batch"},
}
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


class Client:
    """Of one gateway."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=10)

    async def upload(self) -> tuple[str, str]:
        """The file's id, and who keeps it."""
        answer = await self.http.post("/v1/files", **FORM)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"], answer.headers["x-kvroute-replica"]

    async def respond(self, text: str, **fields: Any) -> httpx.Response:
        body = {"model": "sim-model", "input": text, **fields}
        return await self.http.post("/v1/responses", json=body)

    async def batch(self, file: str) -> httpx.Response:
        return await self.http.post("/v1/batches", json={**BATCH, "input_file_id": file})


@asynccontextmanager
async def two_gateways(tmp_path: Path) -> AsyncIterator[tuple[Client, Client, ChaosFleet]]:
    """Before the same three replicas, with one Redis between them and nothing else in common."""
    server = EmbeddedServer()
    await server.ensure()
    shared = {"redis_url": server.url, "admin_token": "t", "policy": "round_robin"}
    try:
        async with chaos_fleet(3, tmp_path, **shared) as fleet:
            options = ("--config", str(tmp_path / "kvroute.yaml"), *tokenizer_options())
            urls = [each.url for each in fleet.replicas]
            process, url = await asyncio.to_thread(start_gateway, urls, *options)
            one, two = Client(fleet.url), Client(url)
            try:
                yield one, two, fleet
            finally:
                await one.http.aclose()
                await two.http.aclose()
                await asyncio.to_thread(process.end)
    finally:
        await server.close()


async def test_what_is_made_through_one_gateway_is_found_through_the_other(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (one, two, _):
        owners = set()
        for maker, other in ((one, two), (two, one), (one, two)):
            file, owner = await maker.upload()
            owners.add(owner)
            content = await other.http.get(f"/v1/files/{file}/content")
            assert (content.status_code, content.json()) == (200, LINE)
            assert content.headers["x-kvroute-replica"] == owner
            batch = await other.batch(file)
            assert (batch.status_code, batch.headers["x-kvroute-replica"]) == (200, owner)
            made = f"/v1/batches/{batch.json()['id']}"
            assert (await maker.http.get(made)).headers["x-kvroute-replica"] == owner

            first = await maker.respond("one")
            follow = await other.respond("two", previous_response_id=first.json()["id"])
            assert follow.status_code == 200
            assert follow.headers["x-kvroute-replica"] == first.headers["x-kvroute-replica"]
            owners.add(follow.headers["x-kvroute-replica"])
        assert len(owners) > 1, "with one owner for all, nothing was shown"


async def test_an_owner_that_was_removed_is_a_404_at_both(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (one, two, _):
        file, owner = await one.upload()
        made = await one.respond("one", background=False)
        for each in (one, two):
            gone = await each.http.delete(f"/admin/replicas/{owner}", headers=ADMIN)
            assert gone.json()["removed"] is True
            for answer in (await each.http.get(f"/v1/files/{file}"), await each.batch(file)):
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
                assert f"'{file}' cannot be found: its replica is gone" in answer.text
        kept = await two.http.get(f"/v1/responses/{made.json()['id']}")
        assert kept.status_code == (404 if made.headers["x-kvroute-replica"] == owner else 200)
        for each in (one, two):
            unknown = await each.batch("file-that-nobody-made")
            assert unknown.status_code == 404
            assert unknown.json()["error"]["param"] == "input_file_id"


def owner_of(fleet: ChaosFleet, name: str) -> OneReplica:
    return next(each for each in fleet.replicas if each.name == name)


async def test_a_replica_killed_between_a_file_and_its_batch(tmp_path: Path) -> None:
    """While it may come back, a 503 that names it; once it is back without the file, its own 404;
    once it is out of the fleet, ours. None of them hangs, and nobody else gets the batch.
    """
    async with chaos_fleet(2, tmp_path, admin_token="t", probe_interval_s=0.2) as fleet:
        client = Client(fleet.url)
        try:
            file, name = await client.upload()
            owner = owner_of(fleet, name)
            owner.kill()
            for _ in range(2):  # before it is known to be down, and after
                answer = await client.batch(file)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (503, "no_replica")
                assert name in error["message"] and answer.headers["retry-after"]
            await owner.restart()
            await fleet.all_up()
            answer = await client.batch(file)
            assert answer.status_code == 404 and file in answer.text
            assert answer.headers["x-kvroute-replica"] == name
            owner.kill()
            removed = await client.http.delete(f"/admin/replicas/{name}", headers=ADMIN)
            assert removed.json()["removed"] is True
            answer = await client.batch(file)
            # With one replica left nobody else could have it; that one says so itself.
            assert answer.status_code == 404 and file in answer.text
            await fleet.becomes_idle()
        finally:
            await client.http.aclose()
