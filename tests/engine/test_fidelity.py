"""The simulated replica beside a real one: the same requests to both, compared field by field."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from loadgen.engine.replica import Replica
from tests.engine.gateway import prose
from tests.engine.replica import MODEL, TOPIC
from tests.engine.script import CHAT, Step, said, script
from tests.engine.shape import answer_shape, differences
from tests.engine.simulated import Side, simulated_replica

pytestmark = pytest.mark.engine

LISTED = Path(__file__).with_name("differences.txt")
MOST_LISTED = 30
ANSWER_S = 120.0
QUIET_MS = 1_000


@pytest.fixture(scope="module")
def real(replica: Replica) -> Side:
    ports = (replica.event_port, replica.replay_port)
    return Side(replica.url, *(f"tcp://127.0.0.1:{port}" for port in ports))


@pytest.fixture(scope="module")
def simulated(replica: Replica) -> Iterator[Side]:
    with simulated_replica(replica.model_folder) as side:
        yield side


def answers(side: Side) -> dict[str, httpx.Response]:
    with httpx.Client(base_url=side.url, timeout=ANSWER_S) as client:
        return {step.name: send(client, step) for step in script(MODEL)}


def send(client: httpx.Client, step: Step) -> httpx.Response:
    content = step.content()
    headers = {} if content is None else {"content-type": "application/json"}
    headers |= step.headers
    return client.request(step.method, step.path, content=content, headers=headers)


def reset(side: Side) -> None:
    httpx.post(f"{side.url}/reset_prefix_cache", timeout=30).raise_for_status()


@dataclass
class Allowed:
    """The differences that are known, each a pattern of whole lines with its reason."""

    patterns: list[re.Pattern[str]]

    def check(self, found: list[str]) -> None:
        unlisted = [line for line in found if not any(p.fullmatch(line) for p in self.patterns)]
        gone = [p.pattern for p in self.patterns if not any(map(p.fullmatch, found))]
        assert not unlisted, "differences that are not listed:\n" + "\n".join(unlisted)
        assert not gone, "listed, but no longer there:\n" + "\n".join(gone)


@pytest.fixture(scope="module")
def allowed() -> Allowed:
    lines = [line for line in LISTED.read_text().splitlines() if line and line[0] != "#"]
    for line in lines:
        assert "  # " in line, f"no reason for: {line}"
    assert len(lines) <= MOST_LISTED, "the list is to be kept short"
    return Allowed([re.compile(line.split("  # ")[0].strip()) for line in lines])


def test_both_answer_alike(real: Side, simulated: Side, allowed: Allowed) -> None:
    for side in (real, simulated):
        reset(side)
    theirs, ours = answers(real), answers(simulated)
    allowed.check(
        [
            f"{name}: {line}"
            for name, answer in theirs.items()
            for line in differences(answer_shape(answer), answer_shape(ours[name]))
        ]
    )


def test_both_publish_alike(real: Side, simulated: Side) -> None:
    """Which blocks are stored and removed when, with all fields; hashes are of each's own."""
    theirs, ours = published(real), published(simulated)
    assert [kind for _, _, kinds in theirs for kind in kinds], "nothing was published"
    assert ours == theirs


def published(side: Side) -> list[tuple[str, int, list[Any]]]:
    """The shape of each batch that a fixed list of requests makes."""
    reset(side)
    long = prose("the events of a replica", 20)
    base = {"model": MODEL, "max_tokens": 1, "temperature": 0}
    bodies = [
        {"messages": said("Begin.")},
        {"messages": said(long)},
        {"messages": said(long)},
        {"messages": said(f"{long} And more of the same kind, as long as a block or two. " * 2)},
        {"messages": said(long), "cache_salt": "tenant"},
        {"messages": said(f"{long} In a session."), "session_id": "s-1"},
        # Removals: more than the cache holds.
        *({"messages": said(prose(f"to remove the others {i}", 150))} for i in range(5)),
    ]
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(side.events)
        socket.subscribe(TOPIC)
        # A subscription takes effect unannounced.
        while not socket.poll(QUIET_MS):
            httpx.post(f"{side.url}{CHAT}", json=base | {"messages": said(long[::-1])}, timeout=60)
            reset(side)
        while socket.poll(QUIET_MS):
            socket.recv_multipart()
        reset(side)
        for body in bodies:
            answer = httpx.post(f"{side.url}{CHAT}", json=base | body, timeout=ANSWER_S)
            answer.raise_for_status()
        frames = []
        while socket.poll(QUIET_MS):
            frames.append(socket.recv_multipart())
    return [batch_shape(*frame) for frame in frames]


def batch_shape(topic: bytes, seq: bytes, payload: bytes) -> tuple[str, int, list[Any]]:
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    assert len(seq) == struct.calcsize(">Q") and isinstance(timestamp, float)
    return topic.decode(), rank, [event_shape(event) for event in events]


def event_shape(event: dict[str, Any]) -> dict[str, Any]:
    shaped = dict(event)
    if "block_hashes" in event:
        assert all(isinstance(each, int) for each in event["block_hashes"])
        shaped["block_hashes"] = len(event["block_hashes"])
    if event.get("parent_block_hash") is not None:
        shaped["parent_block_hash"] = type(event["parent_block_hash"]).__name__
    return shaped
