"""The index in memory, where random histories do not reach: slots, holes, bounds."""

from __future__ import annotations

import pytest

from cache_index import Holder, pack_hashes
from cache_index.errors import RadixInconsistent
from cache_index.radix import HolderRecord, RadixIndex

RUN = pack_hashes(range(1, 65))
TAIL = pack_hashes(range(100, 110))
FULL = 2**64 - 1


def record(number: int, unit: int = 1) -> HolderRecord:
    return HolderRecord(Holder(f"r{number}", 0, "device"), unit)


def holder_id(number: int) -> bytes:
    return number.to_bytes(4, "little")


def radix(max_units: int = 1000) -> RadixIndex:
    index = RadixIndex(max_units)
    for number in range(4):
        index.add_holder(holder_id(number), record(number))
    index.extend(RUN[:8], 0, RUN)
    index.extend(TAIL[:8], 0, TAIL)
    return index


def test_each_holder_drops_out_at_its_own_place() -> None:
    index = radix()
    index.set_mask(RUN[:8], holder_id(0), FULL)
    index.set_mask(TAIL[:8], holder_id(0), 2**10 - 1)
    index.set_mask(RUN[:8], holder_id(1), FULL)
    index.set_mask(TAIL[:8], holder_id(1), 0b1011)
    index.set_mask(RUN[:8], holder_id(2), 0b111)
    index.set_mask(TAIL[:8], holder_id(3), 2**10 - 1)
    matched = {holder.replica: units for holder, units in index.match(RUN + TAIL).items()}
    assert matched == {"r0": 74, "r1": 66, "r2": 3}
    assert index.match(TAIL) == {
        Holder("r0", 0, "device"): 10,
        Holder("r1", 0, "device"): 2,
        Holder("r3", 0, "device"): 10,
    }


@pytest.mark.parametrize("asked", range(65))
def test_a_prompt_may_end_or_leave_anywhere_in_a_run(asked: int) -> None:
    index = radix()
    index.set_mask(RUN[:8], holder_id(0), FULL)
    stranger = pack_hashes([999])
    expected = {Holder("r0", 0, "device"): asked} if asked else {}
    assert index.match(RUN[: asked * 8]) == expected
    assert index.match(RUN[: asked * 8] + stranger) == expected


def test_a_match_is_whole_units_of_the_holder() -> None:
    index = radix()
    index.add_holder(b"wide", record(9, unit=6))
    index.set_mask(RUN[:8], b"wide", 2**20 - 1)
    assert index.match(RUN) == {Holder("r9", 0, "device"): 18}
    index.set_mask(RUN[:8], b"wide", 2**5 - 1)
    assert index.match(RUN) == {}


def test_a_run_that_grows_is_not_held_whole_any_more() -> None:
    index = RadixIndex(100)
    index.add_holder(holder_id(0), record(0))
    index.extend(RUN[:8], 0, RUN[:80])
    index.set_mask(RUN[:8], holder_id(0), 2**10 - 1)
    index.extend(RUN[:8], 10, RUN[80:])
    assert index.match(RUN) == {Holder("r0", 0, "device"): 10}
    assert index.units == 64


def test_saying_it_twice_changes_nothing() -> None:
    index = radix()
    index.set_mask(RUN[:8], holder_id(0), FULL)
    index.extend(RUN[:8], 0, RUN[:80])
    index.extend(RUN[:8], 10, RUN[80:])
    assert index.match(RUN) == {Holder("r0", 0, "device"): 64}
    assert index.units == 74


def test_a_hole_is_an_inconsistency() -> None:
    index = radix()
    with pytest.raises(RadixInconsistent):
        index.extend(TAIL[:8], 11, RUN)
    with pytest.raises(RadixInconsistent):
        index.extend(b"unknown!", 3, RUN)


def test_a_dropped_holder_matches_nothing_and_its_slot_starts_clean() -> None:
    index = radix()
    index.set_mask(RUN[:8], holder_id(0), FULL)
    index.set_mask(TAIL[:8], holder_id(0), 0b1)
    index.drop_holder(holder_id(0))
    assert index.match(RUN) == {}
    for _ in range(4):
        index.sweep(1)
    index.add_holder(b"new!", record(7))
    assert index._slots[b"new!"] == 0
    assert index.match(RUN) == {} == index.match(TAIL)


def test_a_slot_is_not_reused_before_it_is_swept() -> None:
    index = radix()
    index.set_mask(RUN[:8], holder_id(0), FULL)
    index.drop_holder(holder_id(0))
    index.sweep(1)
    index.add_holder(b"new!", record(7))
    assert index.match(RUN) == {}


def test_past_its_bound_a_new_run_is_refused() -> None:
    index = radix(max_units=80)
    index.extend(b"12345678", 0, RUN)
    assert (index.units, index.refused_units) == (74, 64)
    index.set_mask(b"12345678", holder_id(0), FULL)
    assert index.match(b"12345678" + RUN[8:]) == {}


def test_deleting_gives_the_units_back() -> None:
    index = radix()
    index.delete(RUN[:8])
    index.delete(RUN[:8])
    assert (index.units, index.nodes) == (10, 1)
