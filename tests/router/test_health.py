"""What the prober asks, what it makes of the answers, and how soon a replica is used again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.breaker import State
from router.config import ReplicaConfig, Settings
from router.engines import (
    EngineKind,
    EngineLoad,
    engine_load,
    is_sglang,
    is_sleeping,
    listed_publishers,
    served_models,
    sglang_publishers,
)
from router.health import Prober
from router.replicas import Fleet, Replica
from router.wire import MAX_ANSWER_BYTES
from tests.router.support import (
    ScriptedReplica,
    Seen,
    answer_ok,
    chat,
    json_answer,
    running_gateway,
    scripted,
)

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
"""


def text_answer(text: str) -> bytes:
    body = text.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def until(done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not done():
            await asyncio.sleep(0.005)


# Parsing


def test_gauges_are_summed_over_ranks() -> None:
    assert engine_load(METRICS) == EngineLoad(running=5, waiting=7, sleeping=False)
    assert engine_load('sglang:num_running_reqs{m="x"} 4\nsglang:num_queue_reqs 1e1\n') == (
        EngineLoad(running=4, waiting=10)
    )
    asleep = METRICS.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert engine_load(asleep).sleeping
    assert engine_load("") == EngineLoad()


@pytest.mark.parametrize("nested", [False, True])
def test_sglang_ranks_publish_on_consecutive_ports(nested: bool) -> None:
    config = {
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:6557",
        "topic": "kv",
    }
    args = {"kv_events_config": orjson.dumps(config).decode(), "dp_size": 3}
    info = {"server_args": args} if nested else args
    assert is_sglang(info)
    found = sglang_publishers(info)
    assert [each.rank for each in found] == [0, 1, 2]
    assert [each.endpoint for each in found] == [f"tcp://*:{5557 + n}" for n in range(3)]
    assert [each.replay_endpoint for each in found] == [f"tcp://*:{6557 + n}" for n in range(3)]
    assert {each.topic for each in found} == {"kv"}


@pytest.mark.parametrize(
    "config",
    [
        None,
        "",
        "{",
        "[]",
        {"publisher": "null", "endpoint": "tcp://*:1"},
        {"publisher": "zmq"},
        {"publisher": "zmq", "endpoint": 5},
    ],
)
def test_sglang_without_usable_publishers_has_none(config: object) -> None:
    assert sglang_publishers({"kv_events_config": config, "dp_size": "x"}) == []


def test_a_port_past_the_last_one_is_left_out() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:65535"}
    assert len(sglang_publishers({"kv_events_config": config, "dp_size": 2})) == 1


FIELDS = (
    *("data", "id", "parent", "0", "1", "endpoint", "replay_endpoint", "topic", "publisher"),
    *("server_args", "kv_events_config", "dp_size", "is_sleeping"),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner | st.sampled_from(["zmq", "tcp://*:5557", 2]),
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(anything)
def test_whatever_a_replica_answers_nothing_raises(answer: Any) -> None:
    served_models(answer)
    listed_publishers(answer)
    sglang_publishers(answer)
    is_sglang(answer)
    is_sleeping(answer)
    engine_load(str(answer))


# Engines as the gateway sees them


async def test_an_sglang_replica_is_known_as_one_and_its_events_are_found() -> None:
    async with scripted(answer_ok) as (replica,):
        config = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "t"}'
        replica.gets["/get_server_info"] = json_answer({"kv_events_config": config, "dp_size": 2})
        replica.gets["/metrics"] = text_answer("sglang:num_running_reqs 4\n")
        async with running_gateway(replica) as running:
            ready = (await running.client.get("/readyz")).json()["replicas"][replica.name]
            assert (ready["kind"], ready["ranks"], ready["engine_running"]) == ("sglang", [0, 1], 4)
            assert [spec.endpoint for spec in running.index.specs] == [
                "tcp://127.0.0.1:5557",
                "tcp://127.0.0.1:5558",
            ]


async def test_routes_of_sglang_go_to_replicas_of_its_kind() -> None:
    async with scripted(answer_ok, answer_ok, answer_ok) as replicas:
        *_, sglang = replicas
        for replica, owner in zip(replicas, ("vllm", "vllm", "sglang"), strict=True):
            card = {"id": "sim", "object": "model", "owned_by": owner}
            replica.gets["/v1/models"] = json_answer({"data": [card]})
        sglang.gets["/get_model_info"] = json_answer({"is_generation": True})
        async with running_gateway(*replicas) as running:
            for _ in range(3):
                info = await running.client.get("/get_model_info")
                assert (info.status_code, info.json()) == (200, {"is_generation": True})
                await running.client.post("/generate", json={"text": "x"})
            assert [len(each.seen) for each in replicas] == [0, 0, 3]
            sglang.health = "503 Service Unavailable"
            running.gateway.fleet.replicas[sglang.name].failed("test")
            nowhere = await running.client.get("/get_model_info")
            assert nowhere.status_code == 404


async def test_a_vllm_replica_signs_its_models() -> None:
    async with scripted(answer_ok) as (replica,):
        card = {"id": "sim", "object": "model", "owned_by": "vllm"}
        replica.gets["/v1/models"] = json_answer({"data": [card]})
        replica.gets["/metrics"] = text_answer(METRICS)
        async with running_gateway(replica) as running:
            ready = (await running.client.get("/readyz")).json()["replicas"][replica.name]
            assert (ready["kind"], ready["engine_waiting"], ready["state"]) == ("vllm", 7, "up")


async def test_gauges_without_end_take_no_replica_out() -> None:
    async with scripted(answer_ok) as (replica,):
        replica.gets["/metrics"] = text_answer("x" * (MAX_ANSWER_BYTES + 1))
        async with running_gateway(replica, probe_interval_s=30) as running:
            ready = (await running.client.get("/readyz")).json()["replicas"][replica.name]
            assert (ready["state"], ready["engine_running"]) == ("up", None)


@pytest.mark.parametrize("dev_mode", [True, False])
async def test_a_sleeping_engine_gets_nothing_until_it_is_awake(dev_mode: bool) -> None:
    def sleep(replica: ScriptedReplica, sleeping: bool) -> None:
        awake = f'vllm:engine_sleep_state{{sleep_state="awake"}} {float(not sleeping)}\n'
        replica.gets["/metrics"] = text_answer(awake)
        if dev_mode:
            replica.gets["/is_sleeping"] = json_answer({"is_sleeping": sleeping})

    async with scripted(answer_ok, answer_ok) as (tired, other):
        sleep(tired, False)
        async with running_gateway(tired, other, probe_interval_s=0.02) as running:
            state = running.gateway.fleet.replicas[tired.name]
            assert state.state == "up"
            sleep(tired, True)
            await until(lambda: state.state == "sleeping")
            for _ in range(4):
                await running.post(chat())
            assert (len(tired.seen), len(other.seen)) == (0, 4)
            sleep(tired, False)
            await until(lambda: state.healthy)
            for _ in range(4):
                await running.post(chat())
            assert tired.seen


async def test_publishers_that_cannot_be_asked_for_leave_what_was_known() -> None:
    async with scripted(answer_ok) as (replica,):
        replica.event_sources = {"0": {"endpoint": "tcp://*:7000"}}
        async with running_gateway(replica, probe_interval_s=0.01) as running:
            before = running.index.specs
            assert len(before) == 1
            broken = json_answer({}, "500 Internal Server Error")
            replica.gets["/kv_event_sources"] = broken
            seen = running.gateway.fleet.replicas[replica.name]
            await asyncio.sleep(0.2)  # many probes, and some that learn
            assert seen.state == "up" and running.index.specs == before


# How soon


@pytest.mark.slow
async def test_a_replica_is_used_again_within_two_seconds_of_its_return() -> None:
    async with scripted(answer_ok, answer_ok) as (flapping, other):
        async with running_gateway(flapping, other, probe_interval_s=30) as running:
            await flapping.stop()
            await running.post(chat())
            await running.post(chat())
            assert running.gateway.fleet.replicas[flapping.name].state == "down"
            await asyncio.sleep(0.5)
            seen = len(flapping.seen)
            await flapping.start(flapping.port)
            back_s = time.monotonic()
            async with asyncio.timeout(2):
                while len(flapping.seen) == seen:
                    assert (await running.post(chat())).status_code == 200
                    await asyncio.sleep(0.02)
            assert time.monotonic() - back_s < 2


async def test_broken_requests_take_a_replica_out_and_a_probe_brings_its_trial() -> None:
    cut = True

    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if cut:
            raise ConnectionResetError
        await answer_ok(seen, reader, writer)

    async with scripted(script, answer_ok) as (broken, well):
        async with running_gateway(broken, well, probe_interval_s=30) as running:
            replica = running.gateway.fleet.replicas[broken.name]
            while replica.breaker.state is State.CLOSED:
                assert (await running.post(chat())).status_code == 200
            assert len(broken.seen) == 3
            cut = False
            await until(lambda: replica.state == "half_open", timeout_s=0.5)
            while replica.state == "half_open":
                assert (await running.post(chat())).status_code == 200
            assert replica.state == "slow_start"
            text = (await running.client.get("/metrics")).text
            name = broken.name
            assert f'kvroute_replica_state{{replica="{name}",state="slow_start"}} 1.0' in text
            assert f'kvroute_replica_up{{replica="{name}"}} 1.0' in text
            assert 'kvroute_breaker_transitions_total{state="half_open"} 1.0' in text
            assert 'kvroute_ejections_total{kind="errors"} 0.0' in text


# The prober by itself


@asynccontextmanager
async def probing(*urls: str, **given: Any) -> AsyncIterator[tuple[Fleet, Prober]]:
    settings = Settings(**{"probe_interval_s": 30, **given})
    fleet = Fleet(Replica.from_config(ReplicaConfig(url=url), settings) for url in urls)
    prober = Prober(fleet, settings)
    await prober.start()
    try:
        yield fleet, prober
    finally:
        await prober.close()


async def test_one_late_answer_is_forgiven_and_two_are_not() -> None:
    late = False

    class Late(ScriptedReplica):
        def _control(self, seen: Seen) -> bytes:
            if late and seen.target == "/health":
                return b""  # the prober waits on
            return super()._control(seen)

    replica = Late()
    await replica.start()
    given = {"probe_timeout_s": 0.05, "probe_interval_s": 0.02}
    async with probing(replica.url, **given) as (fleet, _):
        state = fleet.replicas[replica.name]
        assert (state.state, state.kind) == ("up", EngineKind.UNKNOWN)
        late = True
        connections = replica.connections
        await until(lambda: not state.ready)
        assert replica.connections - connections >= 2
        assert "probe_timeout_s" in state.reason
        late = False
        await until(lambda: state.ready)
        assert state.state == "half_open"
    await replica.stop()


async def test_the_probers_tasks_follow_the_fleet_and_end_with_it() -> None:
    before = asyncio.all_tasks()
    async with scripted(answer_ok, answer_ok) as (first, second):
        async with probing(first.url) as (fleet, _):
            settings = Settings(probe_interval_s=30)
            config = ReplicaConfig(url=second.url)
            joined = Replica.from_config(config, settings)
            with_first = len(asyncio.all_tasks())
            fleet.add(joined)
            await until(lambda: joined.ready)
            assert joined.state == "slow_start"  # its cache is cold, and it is new
            fleet.remove(joined)
            assert fleet.replicas.keys() == {first.name}
            await until(lambda: len(asyncio.all_tasks()) <= with_first + 1)
    await until(lambda: asyncio.all_tasks() <= before)
