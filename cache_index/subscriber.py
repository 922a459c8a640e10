"""The sockets of one source: a SUB for what is published, a DEALER for what was missed.

The socket monitor reports every connection, because a publisher that restarts quickly can look
like one that merely skipped some batches. The replay answers in either framing: with the topic
(vLLM from 0.26) or without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from cache_index.errors import MalformedBatch
from cache_index.events import END_OF_REPLAY, SEQ_BYTES, decode_batch, decode_seq, payload_digest
from cache_index.ledger import Operation
from cache_index.source import Delivery, SourceState
from cache_index.types import SourceSpec

__all__ = ["Subscriber"]

_log = logging.getLogger(__name__)
_HIGH_WATER_MESSAGES = 20_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 3000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 2000
# How long a replay may stand still. Below the lease, so that one lost answer does not cost it.
_REPLAY_STEP_SHARE_OF_LEASE = 0.5
_MIN_REPLAY_STEP_S = 0.5
_BACKOFF_S = (0.2, 10.0)
# A probe this often keeps a lease alive with one probe lost.
_PROBE_SHARE_OF_LEASE = 0.35
# Between replays that bring news, so that a publisher in trouble is not asked in a tight loop.
_REPLAY_PAUSE_S = 0.02
_MESSAGES_PER_TURN = 32


class Subscriber:
    """Feeds a SourceState from its publisher until cancelled."""

    def __init__(
        self,
        spec: SourceSpec,
        state: SourceState,
        context: zmq.asyncio.Context,
        take: Callable[[Sequence[Operation]], None],
        *,
        lease_s: float,
    ) -> None:
        self._spec = spec
        self._state = state
        self._context = context
        self._take = take
        self._probe_s = lease_s * _PROBE_SHARE_OF_LEASE
        self._step_s = max(_MIN_REPLAY_STEP_S, lease_s * _REPLAY_STEP_SHARE_OF_LEASE)
        self._wake = asyncio.Event()
        self._last_proof_s = 0.0
        self.failures: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.error = ""

    async def run(self) -> None:
        """Follow the source for ever; sockets that fail are opened again."""
        pause_s = _BACKOFF_S[0]
        while True:
            started_s = time.monotonic()
            try:
                await self._session()
            except* (zmq.ZMQError, OSError) as group:
                self.error = f"{self._spec.endpoint}: {group.exceptions[0]}"
                _log.warning("source %s/%d: %s", *self._spec.key, self.error)
            except* Exception:
                self.error = "internal error"
                _log.exception("source %s/%d: it starts over", *self._spec.key)
            self._state.disconnected()
            if time.monotonic() - started_s > _BACKOFF_S[1]:
                pause_s = _BACKOFF_S[0]
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _BACKOFF_S[1])

    async def _session(self) -> None:
        subscriber = self._context.socket(zmq.SUB)
        monitor = subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            _set_options(subscriber)
            subscriber.rcvhwm = _HIGH_WATER_MESSAGES
            subscriber.setsockopt(zmq.SUBSCRIBE, self._spec.topic.encode())
            subscriber.connect(self._spec.endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(monitor))
                tasks.create_task(self._receive(subscriber))
                tasks.create_task(self._keep_current())
        finally:
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.error = ""
                self.counts["connected"] += 1
                self._take(self._state.connected(time.monotonic()))
                self._wake.set()
            elif event == zmq.EVENT_DISCONNECTED:
                self._state.disconnected()

    async def _receive(self, subscriber: zmq.asyncio.Socket) -> None:
        turn = 0
        while True:
            frames = await subscriber.recv_multipart()
            delivery = self._delivery(frames[1:] if len(frames) == 3 else [])
            if delivery is not None:
                now_s = time.monotonic()
                self._take(self._state.live(delivery, now_s))
                self._last_proof_s = now_s
                if self._state.replay_wanted:
                    self._wake.set()
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _delivery(self, frames: Sequence[bytes]) -> Delivery | None:
        """`[sequence, payload]` as a delivery; None, counted, if not even that can be read."""
        try:
            if len(frames) != 2:
                raise MalformedBatch("frames")
            seq = decode_seq(frames[0])
            if seq < 0:
                raise MalformedBatch("sequence")
        except MalformedBatch as error:
            self.failures[error.reason] += 1
            return None
        payload = frames[1]
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self.failures[error.reason] += 1
            return Delivery(seq, payload_digest(payload), None)
        self.failures["event"] += batch.malformed
        self.counts["unknown_tag"] += batch.unknown_tags
        self.counts["unknown_field"] += batch.unknown_fields
        return Delivery(seq, payload_digest(payload), batch)

    # -- staying current

    async def _keep_current(self) -> None:
        if self._spec.replay_endpoint is None:
            while True:
                self._state.vouch(time.monotonic())
                await self._wait(self._probe_s)
        dealer: zmq.asyncio.Socket | None = None
        pause_s = _BACKOFF_S[0]
        try:
            while True:
                await self._until_due()
                if dealer is None:
                    dealer = self._open_dealer(self._spec.replay_endpoint)
                if await self._replay(dealer):
                    pause_s = _BACKOFF_S[0]
                    await asyncio.sleep(_REPLAY_PAUSE_S)
                else:
                    # Late answers of this request must not be taken for answers of the next.
                    dealer.close(linger=0)
                    dealer = None
                    await self._pause(pause_s)
                    pause_s = min(pause_s * 2, _BACKOFF_S[1])
        finally:
            if dealer is not None:
                dealer.close(linger=0)

    async def _until_due(self) -> None:
        while not self._state.replay_wanted:
            idle_s = time.monotonic() - self._last_proof_s
            if idle_s >= self._probe_s:
                return
            await self._wait(self._probe_s - idle_s)

    async def _pause(self, seconds: float) -> None:
        """Wait, still vouching for a source that has turned out to have no replay."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._state.vouch(time.monotonic())
            await asyncio.sleep(min(left_s, self._probe_s))

    async def _wait(self, seconds: float) -> None:
        # Not `wait_for`: on Python 3.11 it can swallow a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def _open_dealer(self, endpoint: str) -> zmq.asyncio.Socket:
        dealer = self._context.socket(zmq.DEALER)
        _set_options(dealer)
        dealer.rcvhwm = _HIGH_WATER_MESSAGES
        dealer.connect(endpoint)
        return dealer

    async def _replay(self, dealer: zmq.asyncio.Socket) -> bool:
        """Ask for what may be missing. False if no END came within the deadline."""
        asked_at_s = time.monotonic()
        start = self._state.begin_replay()
        self.counts["replay"] += 1
        try:
            async with asyncio.timeout(self._step_s) as deadline:
                await dealer.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")])
                await self._read_replay(dealer, deadline)
        except TimeoutError:
            self._take(self._state.fail_replay(time.monotonic()))
            return False
        self._take(self._state.end_replay(asked_at_s, time.monotonic()))
        self._last_proof_s = max(self._last_proof_s, asked_at_s)
        return True

    async def _read_replay(self, dealer: zmq.asyncio.Socket, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        turn = 0
        while True:
            frames = await dealer.recv_multipart()
            deadline.reschedule(loop.time() + self._step_s)
            tail = frames[-2:]
            if len(tail) == 2 and _is_end(tail[0]):
                return
            delivery = self._delivery(tail if len(frames) in (3, 4) else [])
            if delivery is not None:
                self._take(self._state.replayed(delivery, time.monotonic()))
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)


def _is_end(frame: bytes) -> bool:
    return frame == END_OF_REPLAY.to_bytes(SEQ_BYTES, "big", signed=True)


def _set_options(socket: zmq.asyncio.Socket) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.IPV6, 1)
