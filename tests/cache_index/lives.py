"""A publisher as a process of its own, so that it can be killed: python -m tests.cache_index.lives.

It sends a burst of batches at once and goes on at a rate, each batch one block of 16 tokens that
name the life and the batch; hashes and sequence numbers are the same in every life.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import msgspec
import zmq

HOLDS = 400
"""Blocks that a life goes round in, so that it can be asked for without knowing how far it is."""


def tokens(life: int, block: int) -> list[int]:
    """What a life's block holds."""
    return [life * 100_000 + block * 16 + at for at in range(16)]


def payload(life: int, number: int) -> bytes:
    block = number % HOLDS
    stored = {
        "type": "BlockStored",
        "block_hashes": [block + 1],
        "parent_block_hash": None,
        "token_ids": tokens(life, block),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [block + 1], "medium": "GPU"}
    events = [removed, stored] if number >= HOLDS else [stored]
    return msgspec.msgpack.encode([time.time(), events, 0])


def main(
    style: str, live: str, again: str, life: int, burst: int, rate: float, topic: str = "a"
) -> None:
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    (pub.connect if style == "dial" else pub.bind)(live)
    if again:
        router.sndhwm = 0
        router.bind(again)
    buffer: deque[tuple[bytes, bytes]] = deque(maxlen=10_000)
    print("up", flush=True)
    start_s, number = time.monotonic(), 0
    while True:
        while number < burst + (time.monotonic() - start_s) * rate:
            entry = number.to_bytes(8, "big"), payload(life, number)
            pub.send_multipart((topic.encode(), *entry))
            buffer.append(entry)
            number += 1
        if router.poll(1):
            client, _, first = router.recv_multipart()
            for entry in buffer:
                if entry[0] >= first:
                    router.send_multipart((client, b"", topic.encode(), *entry))
            router.send_multipart((client, b"", b"", b"\xff" * 8, b""))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]), *sys.argv[7:])
