"""How many KV event streams one event loop can follow: CPU, lag, and where it ends.

    python benchmarks/sources.py --sources 200 --rate 50

A publisher process, pinned to the last core, has a PUB socket (and a ROUTER for replay) for every
source and sends a fixed number of batches a second through real TCP sockets. The index runs in this
process, pinned to the first core, whole: sockets, decoding, ledger, writer, Valkey (on the last
core), change stream, mirror. `--no-redis` leaves out everything behind the ledger: it is what a
gateway pays that follows the same sources as a standby does.

A batch is what one step of a busy replica leaves: two blocks of answers each step, every fifth step
a prefill of 32 blocks, and one removal for each block stored 400 blocks ago, in vLLM's map encoding
with blocks of 16 tokens. `--answers-only` leaves the prefills out: a replica that decodes long
answers. `--rate 0` shows what idle sources cost. `--ceiling` raises the rate until the index falls
behind.

Lag is the time from sending a batch to its being applied, by the one clock of this machine. Not
measured: the rest of a gateway, which shares the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from cache_index import CacheIndex, ModelIdentity, SourceSpec

MODEL = ModelIdentity("bench")
BLOCK = 16
HELD_BLOCKS = 400
PREFILL_BLOCKS, PREFILL_EVERY, DECODED_BLOCKS = 32, 5, 2
CYCLE_BATCHES = 400
SETTLE_S = 3.0
_TIMESTAMP = struct.Struct(">d")
_TIMESTAMP_AT = 2  # after the array's and the number's own byte


class Engine:
    """The events of one replica: an endless cycle, whose end removes what its middle stored."""

    def __init__(self, seed: int, answers_only: bool) -> None:
        self._rng = random.Random(seed)
        self._held: deque[int] = deque()
        self._answers_only = answers_only
        self._parent: int | None = None

    def payloads(self) -> list[bytearray]:
        """One cycle of encoded batches."""
        batches = [self._step(number) for number in range(CYCLE_BATCHES)]
        batches.append([self._removed(block) for block in self._held])
        encode = msgspec.msgpack.encode
        return [bytearray(encode([1.5, events, 0])) for events in batches]

    def _step(self, number: int) -> list[dict[str, Any]]:
        events = []
        if number % PREFILL_EVERY == 0:
            self._parent = None
        if number % PREFILL_EVERY == 0 and not self._answers_only:
            events.append(self._stored(PREFILL_BLOCKS))
        events += [self._stored(1) for _ in range(DECODED_BLOCKS)]
        while len(self._held) > HELD_BLOCKS:
            events.append(self._removed(self._held.popleft()))
        return events

    def _stored(self, blocks: int) -> dict[str, Any]:
        hashes = [self._rng.getrandbits(64) for _ in range(blocks)]
        parent, self._parent = self._parent, hashes[-1]
        self._held.extend(hashes)
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": [self._rng.randrange(150_000) for _ in range(blocks * BLOCK)],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _removed(self, block: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}


def publish(sources: int, answers_only: bool) -> None:
    """The publisher process: prints its ports, then obeys lines `RATE` until stdin ends."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    context = zmq.Context()
    poller = zmq.Poller()
    pubs, routers, cycles = [], [], []
    for number in range(sources):
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        pub.sndhwm = router.sndhwm = 100_000
        addresses = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
        print(*addresses, flush=True)
        pubs.append(pub)
        routers.append(router)
        cycles.append(Engine(number, answers_only).payloads())
        poller.register(router, zmq.POLLIN)
    print("ready", flush=True)
    poller.register(sys.stdin, zmq.POLLIN)
    buffers = [deque[tuple[bytes, bytes]](maxlen=10_000 // max(1, sources // 20)) for _ in pubs]
    send(pubs, routers, cycles, buffers, poller)


def send(
    pubs: list[zmq.Socket[bytes]],
    routers: list[zmq.Socket[bytes]],
    cycles: list[list[bytearray]],
    buffers: list[deque[tuple[bytes, bytes]]],
    poller: zmq.Poller,
) -> None:
    """Send at the asked rate, and answer replays between rounds."""
    sent, rate, next_s = 0, 0.0, time.monotonic()
    by_socket = dict(zip(routers, buffers, strict=True))
    while True:
        wait_ms = 200.0 if not rate else max(0.0, (next_s - time.monotonic()) * 1000)
        for socket, _ in poller.poll(wait_ms):
            if socket in by_socket:
                replay(socket, by_socket[socket])
                continue
            line = sys.stdin.readline()
            if not line:
                return
            rate, next_s = float(line), time.monotonic()
            print(sent, flush=True)
        # A slice of the sources at a time, so that they do not all speak at once.
        if rate and time.monotonic() >= next_s:
            for _ in range(min(10, len(pubs))):
                at, seq = sent % len(pubs), sent // len(pubs)
                payload = cycles[at][seq % len(cycles[at])]
                _TIMESTAMP.pack_into(payload, _TIMESTAMP_AT, time.time())
                number, copied = seq.to_bytes(8, "big"), bytes(payload)
                pubs[at].send_multipart((b"", number, copied))
                buffers[at].append((number, copied))
                sent += 1
            next_s += min(10, len(pubs)) / (rate * len(pubs))


def replay(router: zmq.Socket[bytes], buffer: deque[tuple[bytes, bytes]]) -> None:
    client, _, start = router.recv_multipart()
    for number, payload in buffer:
        if number >= start:
            router.send_multipart((client, b"", b"", number, payload))
    router.send_multipart((client, b"", b"", b"\xff" * 8, b""))


class Publishers:
    """The publisher process, seen from here."""

    def __init__(self, sources: int, answers_only: bool) -> None:
        command = [sys.executable, __file__, "--publish", "--sources", str(sources)]
        command += ["--answers-only"] * answers_only
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.specs = list(self._specs(sources))
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _specs(self, sources: int) -> Iterator[SourceSpec]:
        for number in range(sources):
            live, again = (f"tcp://127.0.0.1:{port}" for port in self._line().split())
            yield SourceSpec(f"r{number}", 0, live, again, "", MODEL)

    def rate(self, batches_per_s: float) -> int:
        """Send so many a second from each source; returns how many were sent until now."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batches_per_s}\n")
        self._process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def measure(index: CacheIndex, publishers: Publishers, rate: float, seconds: float) -> Any:
    """One rate, for some seconds after it has settled."""
    publishers.rate(rate)
    await asyncio.sleep(SETTLE_S)
    before, cpu_s, start_s = applied(index), time.process_time(), time.monotonic()
    sent = await asyncio.to_thread(publishers.rate, rate)
    lags: list[float] = []
    stalls: list[float] = []
    while (now_s := time.monotonic()) - start_s < seconds:
        await asyncio.sleep(0.01)
        stalls.append(time.monotonic() - now_s - 0.01)
        if len(stalls) % 50 == 0:
            lags += [lag for each in index.sources() if (lag := each.lag_s) is not None]
    took_s = time.monotonic() - start_s
    done, sent = applied(index) - before, await asyncio.to_thread(publishers.rate, rate) - sent
    cpu = (time.process_time() - cpu_s) / took_s
    lags.sort()
    stalls.sort()
    return {
        "asked": rate * len(publishers.specs),
        "sent_per_s": round(sent / took_s),
        "applied_per_s": round(done / took_s),
        "cpu_share": round(cpu, 3),
        "us_per_batch": round(cpu * took_s / done * 1e6, 1) if done else None,
        "lag_ms_p50": round(statistics.median(lags) * 1000, 2) if lags else None,
        "lag_ms_p99": round(lags[int(len(lags) * 0.99)] * 1000, 2) if lags else None,
        "loop_delay_ms_p99": round(stalls[int(len(stalls) * 0.99)] * 1000, 2),
        "trust": sum(str(each.trust) == "exact" for each in index.sources()),
    }


def applied(index: CacheIndex) -> int:
    return sum(each.batches for each in index.sources())


async def run(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    publishers = Publishers(options.sources, options.answers_only)
    url = "unix:///nothing/there.sock" if options.no_redis else None
    index = CacheIndex(redis_url=url, registry=CollectorRegistry())
    os.sched_setaffinity(0, {cores[-1]})  # for the server it starts
    await index.start()
    os.sched_setaffinity(0, {cores[0]})
    index.set_sources(publishers.specs)
    rates = [options.rate] if not options.ceiling else ramp(options.rate)
    try:
        for rate in rates:
            found = await measure(index, publishers, rate, options.seconds)
            print(json.dumps(found), flush=True)
            if found["applied_per_s"] < 0.95 * found["asked"]:
                break
    finally:
        publishers.rate(0)
        await index.close()
        publishers.close()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_rss_mb": round(peak_mb)}))


def ramp(rate: float) -> Iterator[float]:
    while True:
        yield rate
        rate *= 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50.0, help="batches a second of each source")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--no-redis", action="store_true")
    parser.add_argument("--answers-only", action="store_true")
    parser.add_argument("--ceiling", action="store_true")
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.sources, options.answers_only)
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
