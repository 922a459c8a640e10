"""What a real vLLM publishes, decoded by the index's own decoder, live and replayed."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator

import httpx
import pytest
import zmq

from cache_index.events import AllBlocksCleared, BlockStored, EventBatch, decode_batch, decode_seq
from tests.engine.gateway import ask, chat, prose
from tests.engine.replica import BLOCK_TOKENS, TOPIC, Replica

pytestmark = pytest.mark.engine

DEADLINE_MS = 20_000
END_OF_REPLAY = -1


class Subscriber:
    """The frames of one publisher, in order."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], replica: Replica) -> None:
        self._replica = replica
        self._context = context
        self._events = context.socket(zmq.SUB)
        self._events.connect(f"tcp://127.0.0.1:{replica.event_port}")
        self._events.subscribe(TOPIC)
        self.batches: list[tuple[int, bytes]] = []

    def receive(self) -> EventBatch:
        assert self._events.poll(DEADLINE_MS), "no events"
        topic, seq, payload = self._events.recv_multipart()
        assert topic == TOPIC.encode()
        self.batches.append((decode_seq(seq), payload))
        return decode_batch(payload)

    def receive_tokens(self, wanted: int) -> list[BlockStored]:
        """Stored events until they hold that many tokens."""
        stored: list[BlockStored] = []
        while sum(event.token_count for event in stored) < wanted:
            batch = self.receive()
            assert not (batch.malformed or batch.unknown_tags or batch.unknown_fields)
            stored += [event for event in batch.events if isinstance(event, BlockStored)]
        return stored

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Every batch the publisher still has from `start` on."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{self._replica.replay_port}")
            dealer.send_multipart([b"", struct.pack(">q", start)])
            found: list[tuple[int, bytes]] = []
            while True:
                assert dealer.poll(DEADLINE_MS), "the replay has no end"
                *_, seq, payload = dealer.recv_multipart()
                if decode_seq(seq) == END_OF_REPLAY:
                    return found
                found.append((decode_seq(seq), payload))

    def close(self) -> None:
        self._events.close()


@pytest.fixture
def events(replica: Replica) -> Iterator[Subscriber]:
    with zmq.Context() as context:
        subscriber = Subscriber(context, replica)
        try:
            subscribed(subscriber, replica)
            yield subscriber
        finally:
            subscriber.close()


def subscribed(subscriber: Subscriber, replica: Replica) -> None:
    """A subscription takes effect unannounced: make batches until one comes through."""
    until_s = time.monotonic() + DEADLINE_MS / 1000
    while not subscriber._events.poll(200):
        assert time.monotonic() < until_s, "the subscription does not take"
        ask(replica.url, chat(f"Warm up number {time.monotonic_ns()}. " * 3, max_tokens=1))
    while subscriber._events.poll(200):
        subscriber.receive()


def token_ids(replica: Replica, body: dict[str, object]) -> list[int]:
    asked = {"messages": body["messages"], "add_generation_prompt": True}
    answer = httpx.post(f"{replica.url}/tokenize", json=asked, timeout=30).json()
    return list(answer["tokens"])


def test_a_prompt_is_announced_in_whole_blocks(replica: Replica, events: Subscriber) -> None:
    body = chat(prose("a prompt to announce", 20), max_tokens=1)
    ids = token_ids(replica, body)
    ask(replica.url, body)
    whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    stored = events.receive_tokens(whole)
    assert b"".join(e.tokens for e in stored) == struct.pack(f"<{whole}I", *ids[:whole])
    assert {e.block_tokens for e in stored} == {BLOCK_TOKENS}
    assert {e.medium for e in stored} == {"GPU"}
    assert {e.lora_name for e in stored} == {None}
    assert stored[0].parent is None
    for before, after in itertools.pairwise(stored):
        assert after.parent == before.hashes[-1]
    assert sum(len(e.hashes) for e in stored) == whole // BLOCK_TOKENS


def test_a_longer_prompt_continues_under_its_parent(replica: Replica, events: Subscriber) -> None:
    system = prose("a parent", 20)
    ask(replica.url, chat(system, "Short.", max_tokens=1))
    shared = len(token_ids(replica, chat(system, ""))) // BLOCK_TOKENS * BLOCK_TOKENS
    first = events.receive_tokens(shared)
    longer = chat(system, prose("a child", 10), max_tokens=1)
    whole = len(token_ids(replica, longer)) // BLOCK_TOKENS * BLOCK_TOKENS
    answer = ask(replica.url, longer)
    more = events.receive_tokens(whole - answer.cached)
    hashes = [engine_hash for event in first for engine_hash in event.hashes]
    assert answer.cached > 0
    assert more[0].parent == hashes[answer.cached // BLOCK_TOKENS - 1]


def test_a_salt_is_named_on_the_first_block_alone(replica: Replica, events: Subscriber) -> None:
    body = chat(prose("a salted prompt", 12), max_tokens=1, cache_salt="tenant-a")
    whole = len(token_ids(replica, body)) // BLOCK_TOKENS * BLOCK_TOKENS
    ask(replica.url, body)
    keys = [key for event in events.receive_tokens(whole) for key in event.extra_keys or ()]
    assert keys[0] == ["tenant-a"]
    assert not any(keys[1:])


def test_a_replay_gives_the_same_bytes_again(replica: Replica, events: Subscriber) -> None:
    ask(replica.url, chat(prose("a prompt to replay", 12), max_tokens=1))
    events.receive()
    seqs = [seq for seq, _ in events.batches]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    again = events.replay(seqs[0])
    assert again[: len(seqs)] == events.batches
    assert events.replay(again[-1][0] + 1) == []


def test_a_reset_is_announced_with_the_next_request(replica: Replica, events: Subscriber) -> None:
    httpx.post(f"{replica.url}/reset_prefix_cache", timeout=30).raise_for_status()
    ask(replica.url, chat(prose("the prompt after a reset", 8), max_tokens=1))
    seen = events.receive().events
    while not any(isinstance(event, BlockStored) for event in seen):
        seen += events.receive().events
    kinds = [type(event) for event in seen]
    assert kinds.index(AllBlocksCleared) < kinds.index(BlockStored)
