"""/admin: who may, what is answered, and that nothing of a removed replica stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.support import (
    SSE_HEAD,
    Running,
    Seen,
    answer_ok,
    chat,
    chunk,
    running_gateway,
    scripted,
)

TOKEN = "s3cret"
AUTH = {"authorization": f"Bearer {TOKEN}"}
PATH = "/admin/replicas"


async def call(running: Running, method: str, path: str = PATH, **kw: Any) -> Any:
    return await running.client.request(method, path, headers=AUTH, **kw)


async def gets(running: Running, name: str) -> None:
    """Wait until a replica answers requests."""
    async with asyncio.timeout(5):
        while (await running.post(chat())).headers.get("x-kvroute-replica") != name:
            await asyncio.sleep(0.005)


async def test_without_a_token_in_the_settings_the_routes_are_off() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/{replica.name}")):
            answer = await call(running, method, path)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "admin_disabled"
            assert "admin_token" in answer.json()["error"]["message"]
        assert running.gateway.fleet.replicas


async def test_who_may_and_what_is_refused() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, admin_token=TOKEN) as running:
            for given in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"bearer {TOKEN}x"):
                answer = await running.client.get(PATH, headers={"authorization": given})
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_admin_token"
            listed = (await call(running, "GET")).json()["replicas"]
            assert listed.keys() == {replica.name}
            assert (listed[replica.name]["state"], listed[replica.name]["requests"]) == ("up", 0)
            for body, param in (
                ({"url": "10.0.0.1:8000"}, "url"),
                ({"url": "dns+http://pods:8000"}, "url"),
                ({}, "url"),
                ({"url": "http://a", "name": "a\nb"}, "name"),
                ({"url": "http://a", "kv_events": [{"rank": 0}]}, "kv_events"),
                ({"url": "http://a", "extra": 1}, "extra"),
                ([], None),
            ):
                answer = await call(running, "POST", json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), body
                assert error["type"] == "invalid_request_error"
            assert (await call(running, "POST", content=b"{")).status_code == 400
            assert (await call(running, "POST", content=b" " * 70_000)).status_code == 413
            twice = await call(running, "POST", json={"url": replica.url})
            assert (twice.status_code, twice.json()["error"]["code"]) == (409, "replica_exists")
            again = await call(running, "POST", json={"url": replica.url, "name": "other"})
            assert (again.status_code, again.json()["error"]["param"]) == (409, "url")
            missing = await call(running, "DELETE", f"{PATH}/nobody")
            assert missing.status_code == 404
            assert replica.name in missing.json()["error"]["message"]
            assert list(running.gateway.fleet.replicas) == [replica.name]


async def test_a_replica_joins_serves_drains_and_leaves_nothing_behind() -> None:
    release = asyncio.Event()

    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))

    async with scripted(answer_ok, script) as (first, second):
        second.event_sources = {"0": {"endpoint": "tcp://*:7000"}}
        given = {"admin_token": TOKEN, "probe_interval_s": 30, "slow_start_s": 0}
        async with running_gateway(first, **given) as running:
            fleet, load = running.gateway.fleet, running.gateway.load
            answer = await call(running, "POST", json={"url": second.url, "name": "new"})
            assert (answer.status_code, answer.json()["name"]) == (201, "new")
            async with asyncio.timeout(5):
                while not fleet.replicas["new"].ready:
                    await asyncio.sleep(0.005)
            assert [spec.replica for spec in running.index.specs] == ["new"]
            old = fleet.replicas["new"]
            streams = [asyncio.create_task(running.post(chat(stream=True))) for _ in range(4)]
            async with asyncio.timeout(5):
                while len(second.seen) < 2 or old.inflight.running < 2:
                    await asyncio.sleep(0.005)
            assert (await call(running, "POST", f"{PATH}/new/drain")).json()["state"] == "draining"
            assert (await call(running, "POST", f"{PATH}/new/undrain")).json()["state"] == "up"
            removed = await call(running, "DELETE", f"{PATH}/new")
            assert (removed.status_code, removed.json()["removed"]) == (200, False)
            for _ in range(3):
                await running.post(chat())
            assert len(second.seen) == 2
            text = (await running.client.get("/metrics")).text
            assert 'kvroute_replica_state{replica="new",state="draining"} 1.0' in text
            release.set()
            bodies = [answer.text for answer in await asyncio.gather(*streams)]
            assert sum(body.endswith("[DONE]\n\n") for body in bodies) == 2
            await running.becomes_idle()
            assert "new" not in fleet.replicas and running.index.specs == []
            assert not [key for key in load.ranks() if key[0] == "new"]
            assert 'replica="new"' not in (await running.client.get("/metrics")).text
            await call(running, "POST", json={"url": second.url, "name": "new"})
            await gets(running, "new")
            assert fleet.replicas["new"] is not old


async def test_force_forgets_at_once_and_lets_running_requests_end() -> None:
    release = asyncio.Event()

    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await release.wait()
        await answer_ok(seen, reader, writer)

    async with scripted(script) as (replica,):
        async with running_gateway(replica, admin_token=TOKEN) as running:
            request = asyncio.create_task(running.post(chat()))
            async with asyncio.timeout(5):
                while not replica.seen:
                    await asyncio.sleep(0.005)
            path = f"{PATH}/{replica.name}?force=true"
            assert (await call(running, "DELETE", path)).json()["removed"] is True
            assert running.gateway.fleet.replicas == {}
            assert (await running.post(chat())).status_code == 503
            again = await call(running, "POST", json={"url": replica.url})
            assert again.status_code == 201
            release.set()
            assert (await request).status_code == 200
            await running.becomes_idle()
            assert running.gateway.fleet.replicas[replica.name].inflight.running == 0
            await gets(running, replica.name)


@pytest.mark.parametrize("name", ["a/b", "a%2Fb"])
async def test_names_with_a_slash_can_be_removed_too(name: str) -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, admin_token=TOKEN) as running:
            await call(running, "POST", json={"url": f"{replica.url}/x", "name": "a/b"})
            assert (await call(running, "POST", f"{PATH}/{name}/drain")).status_code == 200
            assert (await call(running, "DELETE", f"{PATH}/{name}")).json()["removed"] is True
