"""Keeps one source proven current: asks its publisher again for what was missed, or whether it was.

The answer comes in either framing: with the topic (vLLM from 0.26) or without it. Where there is no
replay endpoint, the live connection vouches for the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import zmq
import zmq.asyncio

from cache_index.draining import RawSocket
from cache_index.events import END_FRAME, SEQ_BYTES
from cache_index.intake import Intake
from cache_index.sockets import set_options

__all__ = ["Replayer"]

_HIGH_WATER_MESSAGES = 20_000
# How long a replay may stand still. Below the lease, so that one lost answer does not cost it.
_REPLAY_STEP_SHARE_OF_LEASE = 0.5
_MIN_REPLAY_STEP_S = 0.5
_BACKOFF_S = (0.2, 10.0)
# A probe this often keeps a lease alive with one probe lost.
_PROBE_SHARE_OF_LEASE = 0.35
# Between replays that bring news, so that a publisher in trouble is not asked in a tight loop.
_REPLAY_PAUSE_S = 0.02
_MESSAGES_PER_TURN = 32


class Replayer:
    """The DEALER of one source, and the patience with its publisher."""

    def __init__(
        self, endpoint: str | None, intake: Intake, context: zmq.Context[RawSocket], lease_s: float
    ) -> None:
        self._endpoint = endpoint
        self._intake = intake
        self._state = intake.state
        self._context = context
        self._probe_s = lease_s * _PROBE_SHARE_OF_LEASE
        self._step_s = max(_MIN_REPLAY_STEP_S, lease_s * _REPLAY_STEP_SHARE_OF_LEASE)
        self._wake = asyncio.Event()
        self._last_proof_s = 0.0
        intake.news = self._wake.set

    async def run(self) -> None:
        """Until cancelled. Raises zmq.ZMQError for an address that cannot be used."""
        if self._endpoint is None:
            while True:
                self._state.vouch(time.monotonic())
                await self._wait(self._probe_s)
        dealer: zmq.asyncio.Socket | None = None
        pause_s = _BACKOFF_S[0]
        try:
            while True:
                await self._until_due()
                if dealer is None:
                    dealer = self._open(self._endpoint)
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
            proof_s = max(self._last_proof_s, self._intake.last_live_s)
            idle_s = time.monotonic() - proof_s
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

    def _open(self, endpoint: str) -> zmq.asyncio.Socket:
        dealer = zmq.asyncio.Socket(self._context, zmq.DEALER)
        set_options(dealer)
        dealer.rcvhwm = _HIGH_WATER_MESSAGES
        dealer.connect(endpoint)
        return dealer

    async def _replay(self, dealer: zmq.asyncio.Socket) -> bool:
        """Ask for what may be missing. False if no END came within the deadline."""
        asked_at_s = time.monotonic()
        start = self._state.begin_replay()
        self._intake.counts["replay"] += 1
        try:
            async with asyncio.timeout(self._step_s) as deadline:
                await dealer.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")])
                await self._read(dealer, deadline)
        except TimeoutError:
            self._intake.fail_replay()
            return False
        self._intake.end_replay(asked_at_s)
        self._last_proof_s = max(self._last_proof_s, asked_at_s)
        return True

    async def _read(self, dealer: zmq.asyncio.Socket, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        turn = 0
        while True:
            frames = await dealer.recv_multipart()
            deadline.reschedule(loop.time() + self._step_s)
            tail = frames[-2:]
            if len(tail) == 2 and tail[0] == END_FRAME:
                return
            self._intake.replayed(tail if len(frames) in (3, 4) else ())
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
