"""What the prober learns of a replica and what it makes of it."""

from __future__ import annotations

import asyncio

import pytest

from cache_index.identity import ModelIdentity
from router.engines import dialable, listed_publishers, served_models
from tests.router.support import (
    ScriptedReplica,
    answer_ok,
    chat,
    running_gateway,
    scripted,
)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "gpu-7", "tcp://gpu-7:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://10.0.0.9:5557", "10.0.0.7", "tcp://10.0.0.9:5557"),
        ("ipc:///run/kv.sock", "10.0.0.7", "ipc:///run/kv.sock"),
    ],
)
def test_a_bind_address_becomes_one_to_connect_to(endpoint: str, host: str, expected: str) -> None:
    assert dialable(endpoint, host) == expected


def test_aliases_share_their_base_and_adapters_name_theirs() -> None:
    cards = [{"id": "base"}, {"id": "alias"}, {"id": "tuned", "parent": "base"}]
    models = served_models({"data": cards})
    assert {name: (each.base, each.adapter) for name, each in models.items()} == {
        "base": ("base", ""),
        "alias": ("base", ""),
        "tuned": ("base", "tuned"),
    }


@pytest.mark.parametrize("listing", [None, [], {}, {"data": None}, {"data": [1, {}]}, "x"])
def test_a_malformed_listing_serves_nothing(listing: object) -> None:
    assert served_models(listing) == {}


@pytest.mark.parametrize("listing", [None, [], {"x": {}}, {"0": 5}, {"0": {"endpoint": ""}}])
def test_malformed_publishers_are_left_out(listing: object) -> None:
    assert listed_publishers(listing) == []


async def test_publishers_of_all_ranks_are_declared_to_the_index() -> None:
    async with scripted(answer_ok) as (replica,):
        replica.event_sources = {
            "0": {"endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001", "topic": "kv"},
            "1": {"endpoint": "tcp://*:7002", "replay_endpoint": None},
        }
        async with running_gateway(replica) as running:
            first, second = running.index.specs
            assert (first.replica, first.rank, first.topic) == (replica.name, 0, "kv")
            assert first.endpoint == "tcp://127.0.0.1:7000"
            assert first.replay_endpoint == "tcp://127.0.0.1:7001"
            assert first.model == ModelIdentity("sim")
            assert (second.rank, second.replay_endpoint, second.topic) == (1, None, "")
            assert running.gateway.fleet.replicas[replica.name].ranks == (0, 1)
            ranks = set()
            for _ in range(4):
                await running.post(chat())
                ranks.add(replica.seen[-1].header("x-data-parallel-rank"))
            assert ranks == {"0", "1"}


async def test_declared_publishers_are_used_and_nothing_is_asked() -> None:
    async with scripted(answer_ok) as (replica,):
        declared = {"url": replica.url, "name": "east", "kv_events": [{"endpoint": "tcp://*:7"}]}
        async with running_gateway(replicas=[declared]) as running:
            (spec,) = running.index.specs
            assert (spec.replica, spec.endpoint) == ("east", "tcp://127.0.0.1:7")
            answer = await running.post(chat())
            assert answer.headers["x-kvroute-replica"] == "east"
            assert replica.seen[0].header("x-data-parallel-rank") is None


async def test_a_replica_that_is_not_healthy_gets_nothing() -> None:
    async with scripted(answer_ok, answer_ok) as (sick, well):
        sick.health = "503 Service Unavailable"
        async with running_gateway(sick, well) as running:
            for _ in range(4):
                assert (await running.post(chat())).status_code == 200
            assert sick.seen == []
            ready = (await running.client.get("/readyz")).json()
            assert ready["replicas"][sick.name]["reason"] == "GET /health answered 503"
            sick.health = "200 OK"
            async with asyncio.timeout(5):
                while not sick.seen:
                    await running.post(chat())
                    await asyncio.sleep(0.01)


async def test_only_replicas_that_serve_the_model_get_the_request() -> None:
    async with scripted(answer_ok) as (first,):
        second = ScriptedReplica(models=["other"])
        await second.start()
        async with running_gateway(first, second) as running:
            for _ in range(3):
                answer = await running.post(chat(model="other"))
                assert answer.headers["x-kvroute-replica"] == second.name
            assert first.seen == []
            cards = (await running.client.get("/v1/models")).json()
            assert {card["id"]: card["kvroute_replicas"] for card in cards["data"]} == {
                "sim": [first.name],
                "other": [second.name],
            }
        await second.stop()


async def test_control_routes() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        assert (await running.client.get("/livez")).json() == {"status": "alive"}
        ready = await running.client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert ready.json()["replicas"][replica.name]["trust"] == "none"
        for path in ("/livez", "/readyz"):
            assert (await running.client.head(path)).status_code == 200
        missing = await running.client.get("/nope")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await running.client.put("/livez")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        paths = (await running.client.get("/openapi.json")).json()["paths"]
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(paths)
