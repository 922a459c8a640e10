"""The index in memory: the same nodes as in Redis, matched in microseconds.

A node is a run of at most 64 units, found by the packed hash of its first unit. Who holds it whole
is one integer (a bit per holder), so a match costs one lookup and one comparison of byte strings
per run, and looks at a single holder only where that holder drops out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_index.blocks import HASH_BYTES
from cache_index.errors import RadixInconsistent
from cache_index.groups import Hybrids, Shape
from cache_index.types import Holder

__all__ = ["HolderRecord", "RadixIndex"]


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """A live holder and its own unit, in base units.

    With a shape it is class `number` of a hybrid model's cache; class 0 leads a match.
    """

    holder: Holder
    unit: int
    number: int = 0
    shape: Shape | None = None


class _Node:
    """`full`: bits of the holders of the whole run. `partial`: slot -> mask of the others."""

    __slots__ = ("full", "partial", "run")

    def __init__(self, run: bytes) -> None:
        self.run = run
        self.full = 0
        self.partial: dict[int, int] | None = None


class RadixIndex:
    """Runs by first hash, and holders by slot (a bit number)."""

    def __init__(self, max_units: int) -> None:
        self._max_units = max_units
        self._nodes: dict[bytes, _Node] = {}
        self._slots: dict[bytes, int] = {}
        self._records: dict[int, HolderRecord] = {}
        self._live = 0
        self._parts: dict[int, HolderRecord] = {}
        self._dead = 0
        self._sweep: list[bytes] = []
        self._sweeping = 0
        self._free: list[int] = []
        self._next_slot = 0
        self.units = 0
        self.refused_units = 0

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    @property
    def holders(self) -> int:
        return len(self._slots)

    # -- holders

    def add_holder(self, holder_id: bytes, record: HolderRecord) -> None:
        """Make a holder known; its bits mean nothing before that."""
        if holder_id in self._slots:
            return
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._next_slot
            self._next_slot += 1
        self._slots[holder_id] = slot
        self._records[slot] = record
        if record.number:
            self._parts[slot] = record
        else:
            self._live |= 1 << slot

    def drop_holder(self, holder_id: bytes) -> None:
        """Void all that a holder had, at once; its bits are swept out later."""
        slot = self._slots.pop(holder_id, None)
        if slot is not None:
            del self._records[slot]
            self._parts.pop(slot, None)
            self._live &= ~(1 << slot)
            self._dead |= 1 << slot

    def sweep(self, nodes: int) -> None:
        """One bounded step of taking dead holders' bits out, so that their slots can be reused."""
        if not self._sweep:
            self._finish_sweep()
            if not self._dead:
                return
            self._sweeping = self._dead
            self._sweep = list(self._nodes)
        for node_id in self._sweep[-nodes:]:
            node = self._nodes.get(node_id)
            if node is not None:
                _clear_slots(node, self._sweeping)
        del self._sweep[-nodes:]

    def _finish_sweep(self) -> None:
        swept, self._sweeping = self._sweeping, 0
        self._dead &= ~swept
        self._free.extend(_bits(swept))

    # -- nodes

    def extend(self, node_id: bytes, start: int, hashes: bytes) -> None:
        """The run of a node has these hashes from unit `start` on."""
        node = self._nodes.get(node_id)
        if node is None:
            if start:
                raise RadixInconsistent("a run without its beginning")
            if self.units + len(hashes) // HASH_BYTES > self._max_units:
                self.refused_units += len(hashes) // HASH_BYTES
                return
            self._nodes[node_id] = _Node(hashes)
            self.units += len(hashes) // HASH_BYTES
            return
        before = len(node.run) // HASH_BYTES
        if start > before:
            raise RadixInconsistent("a hole in a run")
        run = node.run[: start * HASH_BYTES] + hashes
        if len(run) > len(node.run):
            self._demote(node, before)
            node.run = run
            self.units += len(run) // HASH_BYTES - before

    def _demote(self, node: _Node, units: int) -> None:
        """Who held all of a run holds only its beginning once it grows."""
        if node.full:
            partial = node.partial or {}
            partial.update((slot, (1 << units) - 1) for slot in _bits(node.full))
            node.full, node.partial = 0, partial

    def set_mask(self, node_id: bytes, holder_id: bytes, mask: int) -> None:
        """What a holder holds of a node now."""
        node = self._nodes.get(node_id)
        slot = self._slots.get(holder_id)
        if node is None or slot is None:
            return
        bit = 1 << slot
        if mask == (1 << len(node.run) // HASH_BYTES) - 1:
            node.full |= bit
            if node.partial is not None:
                node.partial.pop(slot, None)
            return
        node.full &= ~bit
        if mask:
            if node.partial is None:
                node.partial = {}
            node.partial[slot] = mask
        elif node.partial is not None:
            node.partial.pop(slot, None)

    def delete(self, node_id: bytes) -> None:
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self.units -= len(node.run) // HASH_BYTES

    # -- match

    def match(self, packed: bytes) -> dict[Holder, int]:
        """Leading base units of `packed` that each holder can reuse, in whole units of it."""
        total = len(packed) // HASH_BYTES
        nodes = self._nodes
        node = nodes.get(packed[:HASH_BYTES])
        if node is None:
            return {}
        alive = node.full
        for slot in node.partial or ():
            alive |= 1 << slot
        alive &= self._live
        ended: list[tuple[int, int]] = []
        walked: list[tuple[_Node, int, int]] = []
        at = 0
        while alive:
            count = _common(node.run, packed, at)
            still = alive & node.full
            if still != alive:
                still |= self._drop_out(node, alive & ~still, at, count, ended)
                alive = still
            if self._parts:
                walked.append((node, at, count))
            at += count
            if at >= total:
                break
            following = nodes.get(packed[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if following is None:
                break
            node = following
        ended.extend((slot, at) for slot in _bits(alive))
        return self._answer(ended, walked)

    def _drop_out(
        self, node: _Node, doubtful: int, at: int, count: int, ended: list[tuple[int, int]]
    ) -> int:
        """Who of the `doubtful` holds the next `count` units all the same; records the others."""
        partial = node.partial or {}
        wanted = (1 << count) - 1
        still = 0
        for slot in _bits(doubtful):
            mask = partial.get(slot, 0)
            if mask & wanted == wanted:
                still |= 1 << slot
            else:
                leading = (~mask & (mask + 1)).bit_length() - 1
                ended.append((slot, at + leading))
        return still

    def _answer(
        self, ended: list[tuple[int, int]], walked: list[tuple[_Node, int, int]]
    ) -> dict[Holder, int]:
        answer: dict[Holder, int] = {}
        hybrids: Hybrids | None = None
        for slot, units in ended:
            record = self._records[slot]
            if record.shape is not None:
                hybrids = hybrids or Hybrids()
                hybrids.lead(record.holder, record.shape, units)
                continue
            whole = units - units % record.unit
            if whole > answer.get(record.holder, 0):
                answer[record.holder] = whole
        if hybrids is not None:
            self._collect_parts(hybrids, walked)
            answer |= hybrids.answer()
        return answer

    def _collect_parts(self, hybrids: Hybrids, walked: list[tuple[_Node, int, int]]) -> None:
        """What the other classes of hybrid holders have along the way."""
        for slot, record in self._parts.items():
            if not hybrids.leads(record.holder):
                continue
            for node, at, count in walked:
                whole = (1 << count) - 1
                partial = node.partial or {}
                mask = whole if node.full >> slot & 1 else partial.get(slot, 0) & whole
                if mask:
                    hybrids.part(record.holder, record.number, at, mask)


def _common(run: bytes, packed: bytes, at: int) -> int:
    """Units that `run` shares with `packed` from unit `at` on."""
    offset = at * HASH_BYTES
    wanted = packed[offset : offset + len(run)]
    if wanted == run:
        return len(run) // HASH_BYTES
    low, high = 0, min(len(run), len(wanted)) // HASH_BYTES
    if run.startswith(wanted):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if run[: middle * HASH_BYTES] == wanted[: middle * HASH_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _bits(mask: int) -> list[int]:
    """The numbers of the set bits."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _clear_slots(node: _Node, slots: int) -> None:
    node.full &= ~slots
    if node.partial:
        for slot in [s for s in node.partial if slots >> s & 1]:
            del node.partial[slot]
