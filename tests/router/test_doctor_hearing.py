"""Which events speak of one request: by its salt, by its tokens, along its chain."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import zmq
import zmq.asyncio

from cache_index.blocks import pack_tokens
from cache_index.events import BlockRemoved, BlockStored, EventBatch
from router.doctor.hearing import hear
from router.doctor.listening import Ears, Message, _receive

IDS = tuple(range(100, 164))


def stored(start: int, end: int, **fields: Any) -> BlockStored:
    """Blocks of 16 tokens of the prompt; the hash of a block is the number of its last token."""
    given: dict[str, Any] = {
        "hashes": list(range(start + 16, end + 1, 16)),
        "parent": start or None,
        "tokens": pack_tokens(IDS[start:end]),
        "block_tokens": 16,
        "medium": "GPU",
    }
    return BlockStored(**{**given, **fields})


def said(*events: Any, rank: int = 0) -> Message:
    return Message(rank, "kv", 10.0, EventBatch(8.5, list(events), rank))


def test_the_salt_names_the_first_block_and_parents_the_rest() -> None:
    first = stored(0, 32, extra_keys=[["s"], None])
    other = stored(0, 16, hashes=[7], extra_keys=[["t"]])
    heard = hear([said(other), said(first), said(stored(32, 64), BlockRemoved([7]))], 0, "s", [])
    assert heard is not None
    assert (heard.tokens, heard.salted, heard.on_rank) == (IDS, True, 0)
    assert (heard.late_s, heard.topic, heard.block_tokens) == (1.5, "kv", {16})


def test_without_a_salt_the_tokens_must_be_known() -> None:
    plain = said(stored(0, 64), rank=3)
    assert hear([plain], 0, "s", []) is None
    assert hear([plain], 0, "s", [IDS[1:]]) is None
    heard = hear([plain], 0, "s", [IDS])
    assert heard is not None and (heard.salted, heard.on_rank) == (False, 3)


def test_sglang_tells_the_salt_with_every_page() -> None:
    pages = [stored(at, at + 16, cache_salt="s") for at in range(0, 64, 16)]
    heard = hear([said(*pages)], 0, "s", [])
    assert heard is not None and heard.tokens == IDS


def test_groups_of_a_hybrid_model_are_not_mixed() -> None:
    salted = {"extra_keys": [["s"], None, None, None]}
    window = stored(0, 64, group=1, **salted)
    full = stored(0, 64, group=0, **salted)
    again = stored(32, 64, group=1, parent=64)
    heard = hear([said(full, window, again)], 0, "s", [])
    assert heard is not None and heard.tokens == IDS


def test_a_pool_that_drops_the_salt_is_noticed() -> None:
    own = stored(0, 64, extra_keys=[["s"], None, None, None])
    pool = stored(0, 32, medium="CPU", block_tokens=32, hashes=[1])
    heard = hear([said(own, pool)], 0, "s", [IDS])
    assert heard is not None and (heard.pool_unsalted, heard.block_tokens) == (True, {16, 32})
    kept = stored(0, 32, medium="cpu", extra_keys=[["s"], None])
    heard = hear([said(own, kept)], 0, "s", [IDS])
    assert heard is not None and not heard.pool_unsalted
    assert heard.tokens == IDS


async def test_a_flood_of_events_leaves_the_loop_to_others() -> None:
    """Messages that have arrived are had without waiting, so that a flood would never yield."""
    with zmq.asyncio.Context() as context:
        with context.socket(zmq.PUSH) as flood, context.socket(zmq.PULL) as socket:
            socket.connect(f"tcp://127.0.0.1:{flood.bind_to_random_port('tcp://127.0.0.1')}")
            for _ in range(500):
                await flood.send_multipart([b"", b"", b"x"])
            await socket.poll(5000)
            await asyncio.sleep(0.2)
            ears = Ears()
            listening = asyncio.create_task(_receive(socket, 0, ears))
            await asyncio.sleep(0)
            assert ears.unreadable == 1
            async with asyncio.timeout(5):
                while ears.unreadable < 500:
                    await asyncio.sleep(0.01)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
