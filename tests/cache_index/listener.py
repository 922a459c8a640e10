"""The index before the judge: source, ledger and radix on the judge's clock, without I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import count

from cache_index import ModelIdentity, Root, chain_packed, pack_tokens
from cache_index.blocks import HASH_BYTES
from cache_index.changes import PART, holder_record, source_name
from cache_index.errors import MalformedBatch
from cache_index.events import decode_batch, payload_digest
from cache_index.ledger import Ledger, NewEpoch, Operation, Remove
from cache_index.radix import RadixIndex
from cache_index.source import Delivery, SourceState
from cache_index.types import SourceKey, Trust

from .judge.blocks import UNIT_TOKENS, Prompt
from .judge.network import END, Frame
from .judge.verdict import LEASE_S

MODEL = ModelIdentity("judged")
# As the subscriber does it.
PROBE_S, STEP_S, PAUSE_S, BACKOFF_S = 0.35 * LEASE_S, 0.5 * LEASE_S, 0.02, (0.2, 10.0)


def delivery_of(frame: Frame) -> Delivery:
    """A frame as the subscriber hands it on."""
    try:
        batch = decode_batch(frame.payload)
    except MalformedBatch:
        batch = None
    return Delivery(frame.seq, payload_digest(frame.payload), batch)


def packed(prompt: Prompt) -> bytes:
    """The prompt's chain, as the gateway asks for it."""
    root = Root(MODEL, prompt.root.adapter or "", prompt.root.salt or "").digest()
    return chain_packed(root, pack_tokens(prompt.tokens()), UNIT_TOKENS)


class Followed:
    """One source's state machine, asked and told as its subscriber would."""

    def __init__(self, requests: Iterator[int] | None = None) -> None:
        self._requests = requests or count()
        self.state = SourceState(
            MODEL, base_unit_tokens=UNIT_TOKENS, lease_s=LEASE_S, replayable=True
        )
        self._asked_at_s: float | None = None
        self._moved_at_s = self._next_at_s = self._last_proof_s = 0.0
        self._pause_s = BACKOFF_S[0]
        self._request = -1

    def trust(self, now: float) -> str:
        return str(self.state.trust(now)[0])

    def take_requests(self, now: float) -> Sequence[tuple[int, int]]:
        """The replay request that is due, if one is."""
        due = self.state.replay_wanted or now - self._last_proof_s >= PROBE_S
        if self._asked_at_s is not None or now < self._next_at_s or not due:
            return ()
        self._asked_at_s = self._moved_at_s = now
        self._request = next(self._requests)
        return ((self._request, self.state.begin_replay()),)

    def heard(self, frame: Frame, now: float) -> list[Operation]:
        """A live message, or one that answers a request."""
        if frame.request < 0:
            self._last_proof_s = now
            return self.state.live(delivery_of(frame), now)
        if frame.request != self._request or self._asked_at_s is None:
            return []
        self._moved_at_s = now
        if frame.seq != END:
            return self.state.replayed(delivery_of(frame), now)
        asked_at_s, self._asked_at_s = self._asked_at_s, None
        self._last_proof_s = max(self._last_proof_s, asked_at_s)
        self._next_at_s, self._pause_s = now + PAUSE_S, BACKOFF_S[0]
        return self.state.end_replay(asked_at_s, now)

    def tick(self, now: float) -> list[Operation]:
        """Time passes: a replay may have missed its deadline."""
        if self._asked_at_s is None:
            if now < self._next_at_s:
                self.state.vouch(now)
            return []
        if now - self._moved_at_s < STEP_S:
            return []
        self._asked_at_s = None
        self._next_at_s = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, BACKOFF_S[1])
        return self.state.fail_replay(now)


class Index:
    """A radix of runs of one unit, fed with operations in their order."""

    def __init__(self) -> None:
        self.radix = RadixIndex(1_000_000)
        self._holders: dict[tuple[int, str], bytes] = {}
        self._ids = 0

    def apply(self, rank: int, ledger: Ledger, operations: Sequence[Operation]) -> None:
        """Do what Redis and the change stream would do to a mirror."""
        for operation in operations:
            if isinstance(operation, NewEpoch):
                for key in [key for key in self._holders if key[0] == rank]:
                    self.radix.drop_holder(self._holders.pop(key))
                continue
            holder = self._holder(rank, operation.tier, ledger)
            if isinstance(operation, Remove):
                self._set(holder, operation.block.units[operation.keep * HASH_BYTES :], 0)
                continue
            for block in operation.blocks:
                self._set(holder, block.units, 1)

    def _holder(self, rank: int, tier: str, ledger: Ledger) -> bytes:
        key = (rank, tier)
        if key not in self._holders:
            self._ids += 1
            self._holders[key] = self._ids.to_bytes(4, "big")
            name, source = tier.encode(), source_name(SourceKey("r", rank))
            unit, part = ledger.unit_of(tier)
            record = struct.pack("<HH", unit | part * PART, len(name)) + name + source
            self.radix.add_holder(self._holders[key], holder_record(record))
        return self._holders[key]

    def _set(self, holder: bytes, units: bytes, mask: int) -> None:
        for at in range(0, len(units), HASH_BYTES):
            node = units[at : at + HASH_BYTES]
            self.radix.extend(node, 0, node)
            self.radix.set_mask(node, holder, mask)


class PureListener:
    """All of the index but its sockets and Redis."""

    def __init__(self, ranks: int) -> None:
        self.sources = [Followed() for _ in range(ranks)]
        self.index = Index()

    def _take(self, rank: int, operations: Sequence[Operation]) -> None:
        self.index.apply(rank, self.sources[rank].state.ledger, operations)

    def connected(self, rank: int, now: float) -> None:
        self._take(rank, self.sources[rank].state.connected(now))

    def disconnected(self, rank: int, now: float) -> None:
        self.sources[rank].state.disconnected()

    def heard(self, rank: int, frame: Frame, now: float) -> None:
        self._take(rank, self.sources[rank].heard(frame, now))

    def tick(self, now: float) -> None:
        for rank, source in enumerate(self.sources):
            self._take(rank, source.tick(now))

    def take_requests(self, rank: int, now: float) -> Sequence[tuple[int, int]]:
        return self.sources[rank].take_requests(now)

    def trust(self, rank: int, now: float) -> str:
        return self.sources[rank].trust(now)

    def claimed(self, prompt: Prompt, now: float) -> dict[tuple[int, str], int]:
        return {
            (holder.rank, holder.tier): units * UNIT_TOKENS
            for holder, units in self.index.radix.match(packed(prompt)).items()
            if self.sources[holder.rank].state.trust(now)[0] is not Trust.NONE
        }
