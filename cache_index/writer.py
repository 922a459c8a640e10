"""Operations of one source, turned into calls on Redis.

The writer knows where in Redis each unit lies that it has stored (node and position, learned from
the answers), so that a child finds its parent and a removal its bit without a search. At most one
call per source is under way; a call whose answer was lost is sent again unchanged. Whatever cannot
be settled that way (a full queue, a lost answer, a lost lease) ends in the same cure: a new epoch
and the source's whole state written again.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache_index.blocks import HASH_BYTES
from cache_index.changes import PART
from cache_index.ledger import Block, Ledger, NewEpoch, Operation, Remove, Store
from cache_index.redis_index import ApplyCall
from cache_index.types import SourceKey

__all__ = ["SourceWriter"]

_MAX_PENDING = 50_000
_UNITS_PER_CALL = 2048
_PLACE_BYTES = HASH_BYTES + 2
_MISSED, _REFUSED = 0, 0xFFFF
_ROOT_STORE = struct.Struct("<cBHH")
_COUNT = struct.Struct("<H")


@dataclass(slots=True)
class _Draft:
    """A call in the making, and what its answer will be read against."""

    data: bytearray = field(default_factory=bytearray)
    stores: list[tuple[Store, bytes, bytes | None]] = field(default_factory=list)
    unplaced: set[bytes] = field(default_factory=set)
    tier: str | None = None
    units: int = 0


class SourceWriter:
    """The queue and the map of places of one source, while this process may write it."""

    def __init__(self, key: SourceKey, ledger: Ledger) -> None:
        self.key = key
        self.counts: Counter[str] = Counter()
        self._ledger = ledger
        self._token = 0
        self._write = 0
        self._pending: deque[Operation] = deque()
        self._places: dict[str, dict[bytes, bytes]] = {}
        self._draft: _Draft | None = None
        self._call: ApplyCall | None = None
        self._rewrite = False

    @property
    def token(self) -> int:
        """The fencing token while leading, else 0."""
        return self._token

    @property
    def busy(self) -> bool:
        return bool(self._token and (self._call or self._pending or self._rewrite))

    def lead(self, token: int) -> None:
        """Take over: whatever another writer left is replaced by this source's own state."""
        self._reset()
        self._token, self._write = token, 0
        self._rewrite = True

    def stop(self) -> None:
        """The lease is gone."""
        self._reset()
        self._token = 0

    def _reset(self) -> None:
        self._pending.clear()
        self._places.clear()
        self._draft = self._call = None
        self._rewrite = False

    def add(self, operations: Iterable[Operation]) -> None:
        """Queue operations in their order. A writer that does not lead needs none."""
        if not self._token or self._rewrite:
            return
        for operation in operations:
            if isinstance(operation, NewEpoch):
                self._pending.clear()
            self._pending.append(operation)
        if len(self._pending) > _MAX_PENDING:
            self.counts["overflow"] += 1
            self._pending.clear()
            self._rewrite = True

    def next_call(self) -> ApplyCall | None:
        """The call to make now; the same one again until `settle` or `fail`."""
        if self._call is None and self._token:
            if self._rewrite:
                self._rewrite = False
                self._pending = deque([NewEpoch("rewrite"), *self._ledger.held()])
                self.counts["rewrite"] += 1
            draft = self._compose()
            if draft.data:
                self._write += 1
                self._draft = draft
                self._call = ApplyCall(self.key, self._token, self._write, bytes(draft.data))
        return self._call

    def settle(self, status: str, detail: bytes) -> None:
        """Take the answer to the call under way."""
        draft, self._draft, self._call = self._draft, None, None
        self.counts[status] += 1
        if status == "fenced":
            self.stop()
        elif status == "ok" and draft is not None:
            self._learn(draft, detail)
        else:
            # It was applied, but where its units lie is not known any more.
            self._rewrite = True
            self._pending.clear()

    def fail(self) -> None:
        """Redis refused the call itself; sending it again would not help."""
        self.counts["refused_call"] += 1
        self._draft = self._call = None
        self._pending.clear()
        self._rewrite = True

    # -- composing a call

    def _compose(self) -> _Draft:
        draft = _Draft()
        while self._pending and draft.units < _UNITS_PER_CALL:
            operation = self._pending[0]
            if isinstance(operation, NewEpoch):
                if draft.data:
                    break
                draft.data += b"E"
                self._places.clear()
                self._pending.popleft()
            elif isinstance(operation, Remove):
                if not self._remove(draft, operation):
                    break
                self._pending.popleft()
            elif not self._store(draft, operation):
                break
        return draft

    def _select(self, draft: _Draft, tier: str) -> None:
        if draft.tier != tier:
            draft.tier = tier
            name = tier.encode()
            unit, part = self._ledger.unit_of(tier)
            draft.data += struct.pack("<cHB", b"T", unit | part * PART, len(name)) + name

    def _remove(self, draft: _Draft, operation: Remove) -> bool:
        """False if its units were stored in this very call, so that their places are unknown."""
        units = operation.block.units[operation.keep * HASH_BYTES :]
        places = self._places.get(operation.tier, {})
        split = [units[at : at + HASH_BYTES] for at in range(0, len(units), HASH_BYTES)]
        if not draft.unplaced.isdisjoint(split):
            return False
        for unit in split:
            place = places.pop(unit, None)
            if place is not None:
                self._select(draft, operation.tier)
                draft.data += b"R" + place + unit
                draft.units += 1
        return True

    def _store(self, draft: _Draft, operation: Store) -> bool:
        """Put a store into the call. False if the call must end before or after it."""
        anchor, path = self._anchor(operation.blocks[0].parent, draft)
        if anchor is not None and anchor in draft.unplaced:
            return False
        self._pending.popleft()
        block_units = max(1, len(operation.blocks[0].units) // HASH_BYTES)
        room = max(1, (_UNITS_PER_CALL - draft.units) // block_units)
        now = operation
        if len(operation.blocks) > room:
            now = Store(operation.tier, operation.blocks[:room])
            self._pending.appendleft(Store(operation.tier, operation.blocks[room:]))
        held = b"".join(block.units for block in now.blocks)
        hashes = path + held
        if len(hashes) // HASH_BYTES >= _REFUSED:
            self.counts["too_deep"] += 1
            return True
        self._select(draft, now.tier)
        place = self._place(anchor) if anchor is not None else None
        draft.data += _ROOT_STORE.pack(
            b"S", place is not None, len(path) // HASH_BYTES, len(hashes) // HASH_BYTES
        )
        if place is not None and anchor is not None:
            draft.data += place + anchor
        draft.data += hashes
        draft.stores.append((now, hashes, anchor))
        draft.units += len(hashes) // HASH_BYTES
        draft.unplaced.update(
            hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)
        )
        return now is operation

    def _anchor(self, parent: Block | None, draft: _Draft) -> tuple[bytes | None, bytes]:
        """The nearest ancestor unit with a known place, and the units from there to the child."""
        path: list[bytes] = []
        while parent is not None:
            last = parent.units[-HASH_BYTES:]
            if last in draft.unplaced or self._place(last) is not None:
                return last, b"".join(reversed(path))
            path.append(parent.units)
            parent = parent.parent
        return None, b"".join(reversed(path))

    def _place(self, unit: bytes) -> bytes | None:
        for places in self._places.values():
            place = places.get(unit)
            if place is not None:
                return place
        return None

    # -- reading an answer

    def _learn(self, draft: _Draft, detail: bytes) -> None:
        at = 0
        again: list[Operation] = []
        for operation, hashes, anchor in draft.stores:
            (pieces,) = _COUNT.unpack_from(detail, at)
            at += _COUNT.size
            if pieces == _REFUSED:
                self.counts["refused_units"] += len(hashes) // HASH_BYTES
            elif pieces == _MISSED:
                # The parent's node is gone: go on from an older ancestor.
                self.counts["missed"] += 1
                self._forget_node(operation.blocks[0].parent, self._place(anchor or b""))
                again.append(operation)
            else:
                self._learn_places(operation.tier, hashes, detail[at : at + pieces * _PLACE_BYTES])
                at += pieces * _PLACE_BYTES
        self._requeue(again)

    def _requeue(self, again: Sequence[Operation]) -> None:
        if not (self._pending and isinstance(self._pending[0], NewEpoch)):
            self._pending.extendleft(reversed(again))

    def _forget_node(self, block: Block | None, place: bytes | None) -> None:
        """Drop the places of a chain's last units that lie in the node of `place`."""
        node = place[:HASH_BYTES] if place is not None else b""
        while block is not None:
            for at in range(len(block.units) - HASH_BYTES, -1, -HASH_BYTES):
                unit = block.units[at : at + HASH_BYTES]
                found = self._place(unit)
                if found is not None and found[:HASH_BYTES] != node:
                    return
                for places in self._places.values():
                    places.pop(unit, None)
            block = block.parent

    def _learn_places(self, tier: str, hashes: bytes, pieces: bytes) -> None:
        places = self._places.setdefault(tier, {})
        unit_at = 0
        for at in range(0, len(pieces), _PLACE_BYTES):
            node = pieces[at : at + HASH_BYTES]
            start, count = pieces[at + HASH_BYTES], pieces[at + HASH_BYTES + 1]
            for position in range(start, start + count):
                places[hashes[unit_at : unit_at + HASH_BYTES]] = node + bytes((position,))
                unit_at += HASH_BYTES
        self.counts["refused_units"] += (len(hashes) - unit_at) // HASH_BYTES
