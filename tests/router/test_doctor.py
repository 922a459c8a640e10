"""Each finding of the doctor is provoked and found, and a healthy fleet gives none."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadgen.replica.api import Flavor
from loadgen.replica.server import Language
from loadgen.replica.setup import Events, Pool
from loadgen.replica.wire import EventEncoding
from router.config import ReplicaConfig, Settings
from router.doctor import Finding, ReplicaFacts, Severity, findings
from router.doctor.facts import Heard, Probe, Publisher
from router.doctor.gather import Examiner
from router.identify import load_tokenizers
from tests.router.simulated import FOLDER, Start, declared, language, starting
from tests.router.support import (
    ScriptedReplica,
    answer_ok,
    closed_port,
    json_answer,
    running_gateway,
    scripted,
)


@pytest.fixture(scope="module")
def spoken() -> Language:
    return language()


@pytest.fixture
async def start(spoken: Language) -> AsyncIterator[Start]:
    async with starting(spoken) as started:
        yield started


async def examined(
    *replicas: Any, active: bool = True, limit_s: float = 5.0, **given: Any
) -> tuple[tuple[ReplicaFacts, ...], Settings]:
    """Facts of replicas: their URLs, or what the settings say of them."""
    configs = [
        each if isinstance(each, dict) else {"url": each if isinstance(each, str) else each.url}
        for each in replicas
    ]
    settings = Settings(**{"tokenizer": FOLDER, "replicas": configs, **given})
    tokenizers = load_tokenizers(settings)
    async with httpx.AsyncClient(trust_env=False) as client:
        examiner = Examiner(client, settings, tokenizers, limit_s, active)
        return tuple([await examiner.examine(each) for each in settings.replicas]), settings


async def found(*replicas: Any, **given: Any) -> tuple[Finding, ...]:
    return findings(*await examined(*replicas, **given))


def codes(found: tuple[Finding, ...]) -> list[str]:
    return [each.code for each in found]


# A healthy fleet


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("flavor", Flavor)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_healthy_fleet_gives_nothing(
    start: Start, flavor: Flavor, ranks: int, active: bool
) -> None:
    fleet = await start(replicas=2, ranks=ranks, flavor=flavor)
    facts, settings = await examined(*fleet.replicas, active=active)
    assert findings(facts, settings) == ()
    assert all((each.probe is not None) is active for each in facts)
    if active:
        heard = [each for one in facts for each in one.probe.heard]
        assert [each.on_rank for each in heard] == [*range(ranks)] * 2
        assert all(each.salted and each.tokens for each in heard)


@pytest.mark.parametrize(
    "shape",
    [
        {"events": EventEncoding.ARRAY},
        {"dev_mode": False},
        {"block_size_tokens": 128},
        {"pool": Pool.LMCACHE_DRIVEN, "pool_blocks": 4},
        {"topic": "kv@sim"},
    ],
    ids=str,
)
async def test_healthy_in_other_shapes(start: Start, shape: dict[str, Any]) -> None:
    fleet = await start(**shape)
    left = [each for each in await found(*fleet.replicas) if each.severity is not Severity.NOTE]
    assert left == []


# What one replica can have


@dataclass
class Case:
    """A replica's set-up, what is found of it, and what the advice must name."""

    code: str
    mend: str
    setup: dict[str, Any]
    severity: Severity = Severity.ERROR
    active: bool = True
    with_it: tuple[str, ...] = ()
    named: dict[str, Any] | None = None
    """What the settings say of its publishers; None: nothing."""


VLLM_EVENTS = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"'
SGLANG_EVENTS = 'SGLang with --kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557"'
DRIVEN = '{"lmcache.mp.mp_transfer_mode":"lmcache_driven"}'
SGLANG = {"flavor": Flavor.SGLANG}
WARNING, NOTE = Severity.WARNING, Severity.NOTE
CASES = [
    Case("events_off", VLLM_EVENTS, {"events": Events.OFF}, active=False),
    Case("events_off", SGLANG_EVENTS, {**SGLANG, "events": Events.OFF}),
    Case(
        "events_connect",
        "write tcp://*:PORT for the host",
        {"events": Events.CONNECT},
        active=False,
    ),
    Case("events_connect", "SGLang with --kv-events-config", {**SGLANG, "events": Events.CONNECT}),
    Case(
        "events_unreachable",
        "open the port to the gateway",
        {"listed_host": "192.0.2.1"},
        active=False,
    ),
    Case(
        "events_not_listed",
        "kv_events: [{endpoint:",
        {"version": "0.30.1"},
        active=False,
        with_it=("engine_old",),
    ),
    Case("prefix_caching_off", "--enable-prefix-caching", {"prefix_caching": False}, active=False),
    Case("prefix_caching_off", "--enable-prefix-caching", {"prefix_caching": False}),
    Case(
        "prefix_caching_off", "without --disable-radix-cache", {**SGLANG, "prefix_caching": False}
    ),
    Case(
        "prompt_tokens_details_off",
        "vLLM with --enable-prompt-tokens-details",
        {"prompt_tokens_details": False},
        WARNING,
    ),
    Case(
        "prompt_tokens_details_off",
        "SGLang with --enable-cache-report",
        {**SGLANG, "prompt_tokens_details": False},
        WARNING,
    ),
    Case("unit_misfit", "set base_unit_tokens to a divisor of 24", {"block_size_tokens": 24}),
    Case("unit_misfit", "start vLLM with --block-size 16", {"block_size_tokens": 24}, active=False),
    Case("unit_misfit", "start SGLang with --page-size 16", {**SGLANG, "block_size_tokens": 24}),
    Case(
        "salts_ignored", "upgrade the engine to one that knows cache_salt", {"ignore_salts": True}
    ),
    Case("clock", "chrony", {"clock_skew_s": 30.0}, WARNING, active=False),
    Case("clock", "chrony", {"clock_skew_s": -30.0}, WARNING),
    Case("pool_without_removals", DRIVEN, {"pool": Pool.SILENT}, WARNING, active=False),
    Case(
        "pool_without_removals", DRIVEN, {"pool": Pool.STORES}, WARNING, with_it=("pool_unsalted",)
    ),
    Case(
        "pool_mode_unknown",
        DRIVEN,
        {"pool": Pool.STORES, "dev_mode": False},
        NOTE,
        with_it=("pool_unsalted",),
    ),
    Case(
        "pool_unsalted",
        "do not count on the pool for salted requests",
        {"pool": Pool.LMCACHE_DRIVEN},
        NOTE,
    ),
    Case(
        "ranks_missing",
        "name every rank's publisher under `kv_events`",
        {"ranks": 3, "listed_ranks": 2},
        WARNING,
    ),
    Case(
        "ports_overlap",
        "tcp://*:5557 and tcp://*:5657",
        {"ranks": 2, "rank_per_host": True},
        active=False,
    ),
    Case(
        "replay_off", "open that port", {}, WARNING, named={"replay_endpoint": "tcp://127.0.0.1:1"}
    ),
    Case(
        "replay_off",
        '"replay_endpoint":"tcp://*:5657"',
        {},
        WARNING,
        named={"replay_endpoint": None},
    ),
    Case(
        "topic_differs",
        "set `topic` to 'kv@sim'",
        {"topic": "kv@sim"},
        named={"topic": "kv-events"},
    ),
    Case("engine_old", "upgrade vLLM to 0.31 or newer", {"version": "0.30.1"}, NOTE, named={}),
    Case(
        "salts_not_told",
        "upgrade vLLM to 0.19",
        {"version": "0.18.0", "events": EventEncoding.ARRAY},
        WARNING,
        with_it=("engine_old",),
        named={},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.setup}")
async def test_what_one_replica_can_have_is_found(start: Start, case: Case) -> None:
    fleet = await start(**case.setup)
    replica = fleet.replicas[0].url if case.named is None else declared(fleet, **case.named)
    seen = await found(replica, active=case.active)
    assert set(codes(seen)) == {case.code, *case.with_it}, seen
    one = next(each for each in seen if each.code == case.code)
    assert (one.severity, one.replica) == (case.severity, fleet.replicas[0].url[7:])
    assert case.mend in one.mend
    assert one.seen and one.why


# Between replicas


async def test_replicas_of_one_model_that_differ(start: Start, tmp_path: Path) -> None:
    other = copytree(FOLDER, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text("Be kind. " + template.read_text("utf-8"), "utf-8")
    usual = await start(replicas=2)
    odd = await start(
        tokenizer=other, block_size_tokens=32, version="0.33.0", max_model_len_tokens=4096
    )
    name = odd.replicas[0].url[7:]
    seen = await found(*usual.replicas, *odd.replicas, tokenizer=None)
    assert {each.replica for each in seen} == {name}
    mends = {each.code: (each.severity, each.mend) for each in seen}
    assert mends.keys() == {
        "unit_differs", "template_differs", "version_differs", "length_differs"
    }  # fmt: skip
    assert mends["unit_differs"][0] is Severity.WARNING
    assert "the same --block-size" in mends["unit_differs"][1]
    assert mends["template_differs"][0] is Severity.ERROR
    assert "the same --chat-template" in mends["template_differs"][1]
    assert mends["version_differs"][0] is mends["length_differs"][0] is Severity.NOTE


async def test_an_endpoint_that_two_replicas_are_said_to_have(start: Start) -> None:
    fleet = await start(replicas=2)
    first = declared(fleet)
    second = {**first, "url": fleet.replicas[1].url}
    seen = await found(first, second)
    by_code = {each.code: each for each in seen}
    assert by_code.keys() == {"endpoint_shared", "events_not_seen"}
    shared = by_code["endpoint_shared"]
    assert set(shared.replica.split(", ")) == {each.url[7:] for each in fleet.replicas}
    assert "give each its own endpoint" in shared.mend
    assert by_code["events_not_seen"].replica == fleet.replicas[1].url[7:]
    assert "/kv_event_sources" in by_code["events_not_seen"].mend


async def test_ranks_that_are_not_whom_they_are_said_to_be(start: Start) -> None:
    fleet = await start(ranks=2)
    named = declared(fleet)
    for event, rank in zip(named["kv_events"], (1, 0), strict=True):
        event["rank"] = rank
    seen = await found(named)
    assert set(codes(seen)) == {"ranks_mixed"}
    assert "correct `rank` under `kv_events`" in seen[0].mend


# Against our own tokenizer


def altered(folder: Path, name: str, change: Callable[[str], str]) -> Path:
    copy = copytree(FOLDER, folder / "altered")
    path = copy / name
    path.write_text(change(path.read_text("utf-8")), "utf-8")
    return copy


@pytest.mark.parametrize("active", [True, False])
async def test_another_template_here_than_there(start: Start, tmp_path: Path, active: bool) -> None:
    folder = altered(tmp_path, "chat_template.jinja", lambda text: "Be kind. " + text)
    fleet = await start()
    (seen,) = await found(*fleet.replicas, tokenizer=folder, active=active)
    assert (seen.code, seen.severity) == ("template_differs", Severity.ERROR)
    assert "part at token 0" in seen.seen and "--chat-template FILE" in seen.mend


async def test_the_template_is_judged_by_events_where_nobody_tokenizes(
    start: Start, tmp_path: Path
) -> None:
    folder = altered(tmp_path, "chat_template.jinja", lambda text: "Be kind. " + text)
    fleet = await start()
    (facts,), settings = await examined(*fleet.replicas, tokenizer=folder)
    (seen,) = findings((replace(facts, said=type(facts.said)()),), settings)
    assert seen.code == "template_differs"


@pytest.mark.parametrize("active", [True, False])
async def test_another_tokenizer_here_than_there(
    start: Start, tmp_path: Path, active: bool
) -> None:
    def fewer_merges(text: str) -> str:
        content = json.loads(text)
        content["model"]["merges"] = content["model"]["merges"][:100]
        return json.dumps(content)

    folder = altered(tmp_path, "tokenizer.json", fewer_merges)
    fleet = await start()
    (seen,) = await found(*fleet.replicas, tokenizer=folder, active=active)
    assert (seen.code, seen.severity) == ("tokenizer_differs", Severity.ERROR)
    assert "give the gateway the folder that the engine serves" in seen.mend


class Speaker:
    """Answers requests and publishes what a test says of them, right or wrong."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._events = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self.ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in self._sockets()]
        self.task = asyncio.create_task(self._end_replays())
        self.cached, self.pool_chunk_tokens, self.garbage = 112, 0, False
        self.seen: list[str] = []

    def _sockets(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        return self._events, self._replay

    async def _end_replays(self) -> None:
        while True:
            client, *_ = await self._replay.recv_multipart()
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([client, b"", b"", end, b""])

    async def __call__(self, seen: Any, reader: Any, writer: Any) -> None:
        body = json.loads(seen.body)
        ids = list(range(128))
        await self._publish(body["cache_salt"], ids)
        details = {"cached_tokens": self.cached if len(self.seen) == 1 else 0}
        self.seen.append(body["cache_salt"])
        usage = {"prompt_tokens": 128, "prompt_tokens_details": details}
        writer.write(json_answer({"usage": usage, "prompt_token_ids": ids, "choices": []}))

    async def _publish(self, salt: str, ids: list[int]) -> None:
        size, chunk = 16, self.pool_chunk_tokens
        fields = {"parent_block_hash": None, "token_ids": ids, "block_size": size}
        own = {"type": "BlockStored", "block_hashes": list(range(8)), "medium": "GPU", **fields}
        events = [{**own, "extra_keys": [[salt], *[None] * 7]}]
        if chunk:
            events.append({**own, "block_hashes": [99], "medium": "CPU", "block_size": chunk})
            events[-1]["token_ids"] = ids[:chunk]
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        frames = [b"", bytes(8), b"\xc1" if self.garbage else payload]
        await self._events.send_multipart(frames)


@asynccontextmanager
async def speaking() -> AsyncIterator[tuple[ScriptedReplica, Speaker]]:
    context = zmq.asyncio.Context()
    speaker = Speaker(context)
    try:
        async with scripted(speaker) as (replica,):
            yield replica, speaker
    finally:
        speaker.task.cancel()
        await asyncio.gather(speaker.task, return_exceptions=True)
        context.destroy(linger=0)


def named(replica: ScriptedReplica, speaker: Speaker) -> dict[str, Any]:
    """The replica as settings name it with its publisher."""
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in speaker.ports)
    return {
        "url": replica.url,
        "kv_events": [{"endpoint": endpoint, "replay_endpoint": replay}],
    }


async def test_an_engine_that_dials_is_well_where_a_socket_of_ours_is_bound(start: Start) -> None:
    fleet = await start(events=Events.CONNECT)
    endpoint = fleet.replicas[0].describe()["kv_events"][0]
    assert await found(*fleet.replicas, kv_events_bind=endpoint.replace("127.0.0.1", "*")) == ()
    other = await found(*fleet.replicas, kv_events_bind="tcp://*:1")
    assert "events_connect" in codes(other)


# Who cannot be examined


async def test_who_cannot_be_reached() -> None:
    (seen,) = await found(f"http://127.0.0.1:{closed_port()}")
    assert (seen.code, seen.severity) == ("unreachable", Severity.ERROR)
    assert "/v1/models" in seen.mend


async def test_who_is_a_gateway(start: Start) -> None:
    replica = (await start()).replicas[0]
    async with running_gateway(replica.url) as running:
        (seen,) = await found(f"http://127.0.0.1:{running.port}")
    assert seen.code == "unreachable" and "gateway" in seen.seen
    assert "name the replicas behind it" in seen.mend


async def test_who_wants_a_key(start: Start) -> None:
    replica = (await start(api_keys=("k1",))).replicas[0]
    (seen,) = await found(replica)
    assert seen.code == "unreachable" and "replica_api_key" in seen.mend
    assert await found(replica, replica_api_key="k1") == ()
    assert await found({"url": replica.url, "api_key": "k1"}) == ()


async def test_a_sleeping_replica_is_left_asleep(start: Start) -> None:
    fleet = await start()
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        await client.post("/sim/sleep")
    (facts,), settings = await examined(*fleet.replicas)
    (seen,) = findings((facts,), settings)
    assert (seen.code, seen.severity, facts.probe) == ("asleep", Severity.NOTE, None)
    assert "/wake_up" in seen.mend


async def test_a_replica_that_reuses_nothing_though_it_says_so() -> None:
    async with speaking() as (replica, speaker):
        speaker.cached = 0
        (seen,) = await found(named(replica, speaker), tokenizer=None)
    assert (seen.code, seen.severity) == ("no_reuse", Severity.ERROR)
    assert "a URL of its own" in seen.mend and "--enable-prefix-caching" in seen.mend


async def test_a_pool_whose_chunks_are_no_blocks() -> None:
    async with speaking() as (replica, speaker):
        speaker.pool_chunk_tokens = 64
        seen = await found(named(replica, speaker), tokenizer=None)
    assert set(codes(seen)) == {"unit_mixed", "pool_unsalted", "pool_mode_unknown"}
    mixed = next(each for each in seen if each.code == "unit_mixed")
    assert "16, 64" in mixed.seen and "lmcache server --chunk-size" in mixed.mend


async def test_events_that_nobody_can_read() -> None:
    async with speaking() as (replica, speaker):
        speaker.garbage = True
        seen = await found(named(replica, speaker), tokenizer=None)
    assert set(codes(seen)) == {"events_unreadable"}
    assert "upgrade kvroute" in seen[0].mend


async def test_two_models_under_one_name() -> None:
    async with scripted(answer_ok, answer_ok, answer_ok) as replicas:
        for replica, root in zip(replicas, ("/models/a", "/models/a", "/models/b"), strict=True):
            card = {"id": "sim", "owned_by": "vllm", "root": root}
            replica.gets["/v1/models"] = json_answer({"data": [card]})
        seen = await found(*replicas, tokenizer=None, active=False)
    (differs,) = [each for each in seen if each.code == "model_differs"]
    assert differs.replica == replicas[2].name and "--served-model-name" in differs.mend


async def test_a_replica_that_refuses_the_probe() -> None:
    async def refuse(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(json_answer({"error": {"message": "no such task"}}, "400 Bad Request"))

    async with scripted(refuse) as (replica,):
        replica.event_sources = {}
        seen = await found(replica, tokenizer=None)
    refused = next(each for each in seen if each.code == "probe_refused")
    assert "no such task" in refused.seen and refused.severity is Severity.NOTE


async def test_nothing_hangs_on_a_replica_that_does_not_answer() -> None:
    async def silent(seen: Any, reader: Any, writer: Any) -> None:
        await reader.read()

    async with scripted(silent) as (replica,):
        replica.event_sources = {}
        seen = await found(replica, tokenizer=None, limit_s=0.1)
    assert "no answer within" in next(e for e in seen if e.code == "probe_refused").seen


ODD_ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n[[[",
    b"garbage\r\n\r\n",
    json_answer(7),
    json_answer([1]),
    json_answer({"data": [{"id": "m", "root": 5, "max_model_len": "x", "owned_by": 7}]}),
    json_answer({"0": {"endpoint": "tcp://*:abc", "replay_endpoint": "ipc://"}, "1": 7}),
]
ODD_PATHS = [
    "/v1/models", "/version", "/metrics", "/kv_event_sources",
    "/server_info?config_format=json", "/tokenize",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
async def test_odd_answers_are_survived(path: str) -> None:
    for answer in ODD_ANSWERS:
        async with scripted(answer_ok) as (replica,):
            replica.gets[path] = answer
            seen = await found(replica, tokenizer=None, limit_s=0.5)
        assert {each.code for each in seen} & {
            "unreachable", "events_not_listed", "events_off", "events_unreachable"
        }  # fmt: skip


# What the probes do


async def test_probes_are_few_and_touch_nothing_that_is_real(start: Start) -> None:
    fleet = await start(ranks=2)
    (facts,), _ = await examined(*fleet.replicas)
    ranks = fleet.replicas[0].ranks
    sent = sum(rank.stats.prompt for rank in ranks)
    assert facts.probe is not None
    assert sent == 4 * facts.probe.prompt_tokens < 1000
    assert sum(rank.stats.generated for rank in ranks) == 4
    assert [rank.stats.cached for rank in ranks][1] == 0


async def test_with_passive_nothing_is_generated(start: Start) -> None:
    fleet = await start()
    await examined(*fleet.replicas, active=False)
    assert fleet.replicas[0].ranks[0].stats.prompt == 0


@pytest.mark.parametrize(("late_s", "seen"), [(-9.0, "9 s ahead"), (40.0, "40 s behind")])
def test_a_rank_whose_host_has_another_clock(late_s: float, seen: str) -> None:
    heard = Heard(rank=1, on_rank=1, salted=True, late_s=late_s)
    usual = Heard(rank=0, on_rank=0, salted=True, late_s=6.0)
    ranks = [
        Publisher(rank=rank, endpoint=f"tcp://a:{rank}", replay_endpoint=f"tcp://a:1{rank}",
                  topic="", connected=True, replays=True)
        for rank in (0, 1)
    ]  # fmt: skip
    probe = Probe(details=True, cached=(0, 16, 0), heard=(usual, heard))
    facts = ReplicaFacts(
        name="a:1", url="http://a:1", clock_ahead_s=0.0, publishers=tuple(ranks), probe=probe
    )
    (clock,) = findings((facts,), Settings(replicas=[ReplicaConfig(url="http://a:1")]))
    assert clock.code == "clock" and seen in clock.seen


def test_a_publisher_that_dials_the_gateway_is_not_looked_for() -> None:
    where = {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:2"}
    dials = Publisher(rank=0, topic="", connected=False, replays=True, dials=True, **where)
    facts = ReplicaFacts(name="a:1", url="http://a:1", publishers=(dials,))
    settings = Settings(replicas=[ReplicaConfig(url="http://a:1")])
    second = replace(dials, rank=1, replay_endpoint="tcp://127.0.0.1:3")
    other = replace(facts, name="b:1", publishers=(dials, second))
    assert findings((facts, replace(other, dp_size=2)), settings) == ()
    (seen,) = findings((replace(facts, publishers=(replace(dials, dials=False),)),), settings)
    assert seen.code == "events_unreachable"


def test_findings_are_in_order_and_the_same_each_time() -> None:
    facts = tuple(
        ReplicaFacts(name=name, url=f"http://{name}", trouble="gone") for name in ("b:1", "a:1")
    )
    settings = Settings(replicas=[ReplicaConfig(url="http://a:1")])
    assert [each.replica for each in findings(facts, settings)] == ["a:1", "b:1"]
    assert findings(facts, settings) == findings(facts, settings)


def test_every_finding_is_provoked_above() -> None:
    rules = Path(__file__).parents[2] / "router" / "doctor"
    text = "".join(path.read_text("utf-8") for path in rules.glob("rules_*.py"))
    known = set(re.findall(r'Finding\(\s*"(\w+)"', text))
    assert len(known) > 25
    provoked = set(re.findall(r'"(\w+)"', Path(__file__).read_text("utf-8")))
    assert known - provoked == set()
