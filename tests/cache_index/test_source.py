"""The state machine of one publisher: sequence, lives, replay, trust."""

from __future__ import annotations

from typing import Any

import pytest

from cache_index import Trust
from cache_index.events import decode_batch, payload_digest
from cache_index.ledger import NewEpoch, Operation, Remove, Store
from cache_index.source import Delivery, SourceState

from .publisher import CLEARED, MODEL, encode, removed, stored

LEASE_S = 5.0


def delivery(seq: int, *events: dict[str, Any], mark: float = 0.0) -> Delivery:
    payload = encode(events, timestamp_s=mark)
    return Delivery(seq, payload_digest(payload), decode_batch(payload))


def block(number: int, **more: Any) -> dict[str, Any]:
    return stored([number], range(number * 16, number * 16 + 16), **more)


def source(*, replayable: bool = True) -> SourceState:
    return SourceState(MODEL, base_unit_tokens=16, lease_s=LEASE_S, replayable=replayable)


def replay(state: SourceState, *deliveries: Delivery, at_s: float = 0.0) -> list[Operation]:
    start = state.begin_replay()
    out: list[Operation] = []
    for one in deliveries:
        if one.seq >= start:
            out += state.replayed(one, at_s)
    return out + state.end_replay(at_s, at_s)


def synced(*deliveries: Delivery) -> SourceState:
    state = source()
    replay(state, *deliveries)
    assert not state.replay_wanted
    return state


def kinds(operations: list[Operation]) -> list[str]:
    return [type(operation).__name__ for operation in operations]


def test_nothing_is_trusted_before_contact() -> None:
    state = source()
    assert state.trust(0.0) == (Trust.NONE, "no contact yet")
    assert state.live(delivery(0, block(1)), 0.0) == []


def test_an_engine_that_has_published_nothing_is_known_exactly() -> None:
    assert synced().trust(0.0) == (Trust.EXACT, "")


def test_live_batches_wait_for_the_replay_and_are_not_applied_twice() -> None:
    state = source()
    first, second = delivery(0, block(1)), delivery(1, block(2, parent=1))
    state.begin_replay()
    assert state.live(second, 0.0) == []
    assert kinds(state.replayed(first, 0.0)) == ["Store"]
    assert kinds(state.replayed(second, 0.0)) == ["Store"]
    assert state.end_replay(0.0, 0.0) == []
    assert (state.last_seq, state.counts["duplicate"]) == (1, 1)
    assert state.trust(0.0)[0] is Trust.EXACT


def test_a_gap_is_filled_in_order() -> None:
    batches = [delivery(i, block(i + 1)) for i in range(4)]
    state = synced(batches[0])
    assert state.live(batches[3], 1.0) == []
    assert state.replay_wanted
    operations = replay(state, *batches, at_s=1.0)
    assert [len(op.blocks) for op in operations if isinstance(op, Store)] == [1, 1, 1]
    assert state.last_seq == 3
    assert state.trust(1.0)[0] is Trust.EXACT


def test_a_lower_sequence_with_other_content_is_another_life() -> None:
    state = synced(delivery(0, block(1)), delivery(1, block(2)))
    assert kinds(state.live(delivery(0, block(7), mark=9.0), 1.0)) == ["NewEpoch", "Store"]
    assert state.trust(1.0)[0] is Trust.EXACT
    assert state.life == 1


def test_a_redelivered_batch_is_ignored() -> None:
    batches = [delivery(0, block(1)), delivery(1, removed([1]))]
    state = synced(*batches)
    assert state.live(batches[0], 1.0) == []
    assert (state.life, state.last_seq, len(state.ledger)) == (0, 1, 0)


@pytest.mark.parametrize("published", [0, 1, 2, 3, 9])
def test_a_fast_restart_shows_at_reconnect_however_far_the_new_life_is(published: int) -> None:
    old = [delivery(i, block(i + 1)) for i in range(3)]
    new = [delivery(i, block(i + 50), mark=9.0) for i in range(published)]
    state = synced(*old)
    state.connected(1.0)
    out: list[Operation] = []
    while state.replay_wanted:
        out += replay(state, *new, at_s=1.0)
    assert kinds(out) == ["NewEpoch"] + ["Store"] * published
    assert len(state.ledger) == published
    assert state.trust(1.0) == (Trust.EXACT, "")


def test_a_reconnect_to_the_same_life_keeps_everything() -> None:
    old = [delivery(i, block(i + 1)) for i in range(3)]
    state = synced(*old)
    state.connected(1.0)
    assert replay(state, *old, at_s=1.0) == []
    assert (state.life, len(state.ledger)) == (0, 3)


def test_what_was_held_back_from_the_old_life_is_never_applied() -> None:
    state = synced(delivery(0, block(1)))
    state.live(delivery(5, block(6)), 1.0)
    new = [delivery(0, block(50), mark=9.0)]
    while state.replay_wanted:
        replay(state, *new, at_s=1.0)
    assert (state.last_seq, len(state.ledger)) == (0, 1)


def test_past_the_replay_buffer_everything_before_is_dropped() -> None:
    state = synced(delivery(0, block(1)))
    state.live(delivery(9, block(10)), 1.0)
    kept = [delivery(i, block(i + 1)) for i in range(5, 10)]
    out = replay(state, *kept, at_s=1.0)
    assert kinds(out) == ["NewEpoch"] + ["Store"] * 5
    assert state.trust(1.0) == (Trust.PARTIAL, "past the replay buffer")
    state.live(delivery(10, CLEARED, block(90)), 1.0)
    assert state.trust(1.0) == (Trust.EXACT, "")


def test_joining_after_the_buffer_has_moved_on_is_partial_and_drops_orphans() -> None:
    state = source()
    replay(state, delivery(7, block(8, parent=7)), delivery(8, block(9)))
    assert state.trust(0.0) == (Trust.PARTIAL, "older batches have left the replay buffer")
    assert (state.ledger.counts["orphaned"], len(state.ledger)) == (1, 1)


def test_trust_runs_out_and_an_idle_probe_renews_it_as_of_when_it_was_asked() -> None:
    batch = delivery(0, block(1))
    state = synced(batch)
    assert state.trust(LEASE_S)[0] is Trust.EXACT
    assert state.trust(LEASE_S + 0.1) == (Trust.NONE, "not renewed within its lease")
    state.begin_replay()
    state.replayed(batch, 9.0)
    state.end_replay(6.0, 9.0)
    assert state.trust(6.0 + LEASE_S)[0] is Trust.EXACT
    assert state.trust(6.1 + LEASE_S)[0] is Trust.NONE


def test_a_batch_that_cannot_be_read_may_have_held_a_removal() -> None:
    state = synced(delivery(0, block(1)))
    assert kinds(state.live(Delivery(1, 5, None), 1.0)) == ["NewEpoch"]
    assert state.trust(1.0) == (Trust.PARTIAL, "a batch could not be read")
    assert kinds(state.live(delivery(2, block(3)), 1.0)) == ["Store"]
    bad = delivery(3, {"type": "BlockRemoved"})
    assert kinds(state.live(bad, 1.0)) == ["NewEpoch"]


def test_without_replay_from_the_first_batch() -> None:
    state = source(replayable=False)
    state.connected(0.0)
    state.vouch(0.0)
    assert state.trust(0.0)[0] is Trust.PARTIAL
    state.live(delivery(0, block(1)), 0.0)
    assert state.trust(0.0)[0] is Trust.EXACT
    state.vouch(7.0)
    assert state.trust(7.0)[0] is Trust.EXACT
    state.disconnected()
    state.vouch(14.0)
    assert state.trust(14.0)[0] is Trust.NONE


def test_without_replay_a_gap_and_a_reconnect_each_drop_everything() -> None:
    state = source(replayable=False)
    state.connected(0.0)
    state.live(delivery(0, block(1)), 0.0)
    assert kinds(state.live(delivery(2, block(3)), 0.0)) == ["NewEpoch", "Store"]
    assert state.trust(0.0) == (Trust.PARTIAL, "gap")
    state.disconnected()
    assert kinds(state.connected(1.0)) == ["NewEpoch"]
    assert len(state.ledger) == 0
    # The next sequence proves nothing: it may be another life's.
    assert kinds(state.live(delivery(3, block(4)), 1.0)) == ["Store"]
    assert state.trust(1.0)[0] is Trust.PARTIAL


def test_a_replay_that_never_answers_is_done_without_until_it_does() -> None:
    state = source()
    state.connected(0.0)
    for _ in range(2):
        state.begin_replay()
        state.live(delivery(4, block(5)), 0.0)
        state.fail_replay(0.0)
    assert (state.last_seq, len(state.ledger)) == (4, 1)
    assert state.trust(0.0)[0] is Trust.PARTIAL
    assert state.replay_wanted
    everything = [delivery(i, block(i + 1)) for i in range(6)]
    out = replay(state, *everything, at_s=1.0)
    assert kinds(out) == ["NewEpoch"] + ["Store"] * 6
    assert state.trust(1.0) == (Trust.EXACT, "")


def test_more_held_back_than_fits_is_fetched_by_another_replay() -> None:
    state = source()
    state.begin_replay()
    everything = [delivery(i, block(i + 1)) for i in range(1100)]
    for one in everything:
        state.live(one, 0.0)
    state.end_replay(0.0, 0.0)
    assert state.counts["held_back_overflow"] == 76
    while state.replay_wanted:
        replay(state, *everything)
    assert (state.last_seq, len(state.ledger)) == (1099, 1100)


def test_the_epoch_comes_before_what_belongs_to_it() -> None:
    state = synced(delivery(0, block(1)))
    out = state.live(delivery(1, removed([1]), CLEARED, block(2)), 1.0)
    assert [type(op) for op in out] == [Remove, NewEpoch, Store]


def test_a_torn_replay_goes_on_where_it_was_torn() -> None:
    everything = [delivery(i, block(i + 1)) for i in range(9)]
    state = source()
    out = replay(state, *everything[:3], *everything[5:])
    assert (state.last_seq, state.replay_wanted) == (2, True)
    out += replay(state, *everything)
    assert kinds(out) == ["Store"] * 9
    assert not state.replay_wanted
    assert state.trust(0.0) == (Trust.EXACT, "")


def test_a_replay_torn_at_the_same_place_again_and_again_has_lost_it() -> None:
    state = synced(delivery(0, block(1)))
    state.connected(1.0)
    rest = [delivery(0, block(1)), *(delivery(i, block(i + 1)) for i in range(4, 8))]
    out: list[Operation] = []
    for _ in range(10):
        if not state.replay_wanted:
            break
        out += replay(state, *rest, at_s=1.0)
    assert kinds(out) == ["NewEpoch"] + ["Store"] * 4
    assert state.trust(1.0) == (Trust.PARTIAL, "past the replay buffer")


def test_an_answer_that_only_lost_its_end_is_no_failure() -> None:
    everything = [delivery(i, block(i + 1)) for i in range(10)]
    state = source()
    for cut in range(0, 10, 2):
        state.begin_replay()
        for one in everything[: cut + 2]:
            if one.seq >= max(0, state.last_seq):
                state.replayed(one, 0.0)
        state.fail_replay(0.0)
    replay(state, *everything)
    assert (state.last_seq, state.life) == (9, 0)
    assert state.trust(0.0) == (Trust.EXACT, "")


def test_a_publisher_that_says_it_ends_is_followed_by_another_life() -> None:
    state = synced(delivery(0, block(1)), delivery(1, block(2)))
    assert kinds(state.publisher_reset()) == ["NewEpoch"]
    assert (state.life, state.last_seq, len(state.ledger)) == (1, -1, 0)
    assert state.trust(0.0) == (Trust.PARTIAL, "a new life, not replayed yet")
    # The next life may go on with the very next number.
    state.live(delivery(0, block(7), mark=9.0), 1.0)
    assert state.trust(1.0) == (Trust.EXACT, "")


def test_without_replay_the_end_of_the_connection_is_the_end_of_trust() -> None:
    state = source(replayable=False)
    state.connected(0.0)
    state.live(delivery(0, block(1)), 0.0)
    assert state.trust(0.0)[0] is Trust.EXACT
    state.disconnected()
    assert state.trust(0.0) == (Trust.NONE, "its connection is gone, and there is no replay")
    state.connected(0.5)
    state.live(delivery(1, block(2)), 0.5)
    assert (state.trust(0.5)[0], len(state.ledger)) == (Trust.PARTIAL, 1)


def test_with_replay_a_short_disconnect_costs_nothing_within_the_lease() -> None:
    state = synced(delivery(0, block(1)))
    state.disconnected()
    assert state.trust(1.0) == (Trust.EXACT, "")


def test_numbers_that_fall_back_on_one_connection_are_two_publishers() -> None:
    state = source(replayable=False)
    state.connected(0.0)
    for turn in range(4):
        state.live(delivery(turn, block(1), mark=1.0), float(turn))
        state.live(delivery(turn + 40, block(2), mark=2.0), float(turn))
    trust, reason = state.trust(3.0)
    assert trust is Trust.NONE
    assert "two publishers" in reason
    # Long enough without it, or after another connection, it is one again.
    for late in range(50, 54):
        state.live(delivery(late, block(3)), 40.0)
    assert state.trust(40.0)[0] is Trust.PARTIAL


def test_an_engine_that_restarts_often_connects_anew_each_time_and_is_no_conflict() -> None:
    state = source(replayable=False)
    for turn in range(9):
        state.connected(float(turn))
        state.live(delivery(0, block(1), mark=float(turn)), float(turn))
        assert state.trust(float(turn))[0] is Trust.EXACT


def test_what_an_engine_forgot_without_a_word_is_forgotten_until_it_says_so() -> None:
    state = synced(delivery(0, block(1)), delivery(1, block(2)))
    assert kinds(state.void("it slept")) == ["NewEpoch"]
    assert state.trust(0.0) == (Trust.PARTIAL, "it slept")
    assert state.void("it slept") == []
    # Its replay still has all of it; only what is new counts.
    state.connected(1.0)
    assert replay(state, delivery(1, block(2)), at_s=1.0) == []
    state.live(delivery(2, CLEARED, block(3)), 1.0)
    assert (state.trust(1.0), len(state.ledger)) == ((Trust.EXACT, ""), 1)


def test_a_replay_under_way_brings_back_nothing_of_it() -> None:
    state = source()
    state.begin_replay()
    out = state.replayed(delivery(0, block(1)), 0.0)
    out += state.void("it slept")
    out += state.replayed(delivery(1, block(2)), 0.0)
    out += state.end_replay(0.0, 0.0)
    assert kinds(out) == ["Store", "NewEpoch", "Store", "NewEpoch"]
    assert (state.last_seq, len(state.ledger)) == (1, 0)
    assert state.trust(0.0) == (Trust.PARTIAL, "it slept")


def test_an_answer_asked_for_before_a_reconnect_proves_nothing_of_the_peer_after_it() -> None:
    state = synced(delivery(0, block(1)))
    state.begin_replay()
    state.connected(1.0)
    state.replayed(delivery(0, block(1)), 1.0)
    state.end_replay(0.9, 1.0)
    assert state.replay_wanted


PROBED = (Trust.EXACT, "")
REPLAYING = (Trust.PARTIAL, "a replay is under way")


def test_what_waits_for_a_replay_is_not_known_exactly() -> None:
    batches = [delivery(i, block(i + 1)) for i in range(4)]
    state = synced(batches[0])
    state.live(batches[2], 1.0)
    assert state.trust(1.0) == REPLAYING
    state.begin_replay()
    assert state.trust(1.0) == REPLAYING
    for one in batches[:3]:
        state.replayed(one, 1.0)
    assert state.trust(1.0) == REPLAYING
    state.end_replay(1.0, 1.0)
    assert state.trust(1.0) == PROBED
    state.connected(2.0)
    assert state.trust(2.0) == REPLAYING


def test_a_probe_holds_nothing_back_that_goes_on_and_costs_no_trust() -> None:
    batches = [delivery(i, block(i + 1)) for i in range(4)]
    state = synced(batches[0])
    assert state.begin_replay() == 0
    assert state.trust(1.0) == PROBED
    assert kinds(state.live(batches[1], 1.0)) == ["Store"]
    assert kinds(state.live(batches[2], 1.1)) == ["Store"]
    assert state.live(batches[2], 1.1) == []
    assert state.trust(1.1) == PROBED
    # It was served before the last of these was published.
    assert [op for one in batches[:2] for op in state.replayed(one, 1.2)] == []
    assert state.end_replay(1.0, 1.2) == []
    assert not state.replay_wanted
    assert (state.trust(1.2), state.last_seq, state.life) == (PROBED, 2, 0)


def test_a_probe_that_is_never_answered_holds_nothing_back_either() -> None:
    state = synced(delivery(0, block(1)), delivery(1, block(2)))
    state.begin_replay()
    assert kinds(state.live(delivery(2, removed([2])), 1.0)) == ["Remove"]
    assert state.fail_replay(3.5) == []
    assert state.trust(3.5) == PROBED


def test_a_probe_knows_its_publisher_by_what_is_left_in_a_short_buffer() -> None:
    batches = [delivery(i, block(i + 1)) for i in range(6)]
    state = synced(*batches[:2])
    state.begin_replay()
    for one in batches[2:5]:
        state.live(one, 1.0)
    assert kinds([op for one in batches[4:] for op in state.replayed(one, 1.1)]) == ["Store"]
    state.end_replay(1.0, 1.1)
    assert (state.trust(1.1), state.last_seq, state.life) == (PROBED, 5, 0)


@pytest.mark.parametrize("published", [0, 1, 2, 3, 9])
def test_a_probe_that_another_life_answers_is_found_out_after_live_batches(published: int) -> None:
    state = synced(*(delivery(i, block(i + 1)) for i in range(2)))
    start = state.begin_replay()
    state.live(delivery(2, block(3)), 1.0)
    new = [delivery(i, block(i + 50), mark=9.0) for i in range(published)]
    for one in new[start:]:
        state.replayed(one, 1.1)
    state.end_replay(1.0, 1.1)
    assert state.trust(1.1)[0] is Trust.PARTIAL
    # What the old life still had to say is not the new one's.
    assert state.live(delivery(0, block(4)), 1.1) == []
    while state.replay_wanted:
        replay(state, *new, at_s=1.2)
    assert (len(state.ledger), state.trust(1.2)) == (published, PROBED)


def test_a_gap_while_a_probe_is_out_holds_back_whatever_follows() -> None:
    batches = [delivery(i, block(i + 1)) for i in range(6)]
    state = synced(batches[0])
    state.begin_replay()
    assert state.live(batches[2], 1.0) == []
    assert state.trust(1.0) == REPLAYING
    # It could be another life's, though its number is the next.
    assert state.live(delivery(1, block(60), mark=9.0), 1.0) == []
    state.connected(1.0)
    while state.replay_wanted:
        replay(state, *batches[:3], at_s=1.1)
    assert (state.last_seq, state.life, state.trust(1.1)) == (2, 0, PROBED)


def test_an_answer_that_was_under_way_when_a_publisher_ended_is_not_the_next_ones() -> None:
    state = synced(delivery(0, block(1)))
    state.begin_replay()
    state.publisher_reset()
    assert state.live(delivery(0, block(7), mark=9.0), 1.0) == []
    assert state.replayed(delivery(0, block(1)), 1.0) == []
    state.end_replay(0.9, 1.0)
    assert state.replay_wanted
    replay(state, delivery(0, block(7), mark=9.0), at_s=1.0)
    assert (len(state.ledger), state.trust(1.0)) == (1, PROBED)


def test_while_an_unanswered_replay_is_asked_again_live_batches_count_at_once() -> None:
    state = source()
    state.connected(0.0)
    for _ in range(2):
        state.begin_replay()
        state.fail_replay(0.0)
    state.vouch(0.0)
    state.live(delivery(4, CLEARED, block(5)), 0.0)
    assert state.trust(0.0) == (Trust.PARTIAL, "its replay does not answer")
    state.begin_replay()
    assert kinds(state.live(delivery(5, removed([5])), 1.0)) == ["Remove"]
    assert state.fail_replay(3.5) == []
    # When the answer begins after all, what came live meanwhile is applied after it.
    state.begin_replay()
    assert kinds(state.live(delivery(6, block(7)), 4.0)) == ["Store"]
    out = [op for i in range(6) for op in state.replayed(delivery(i, block(i + 1)), 4.0)]
    assert kinds(out + state.end_replay(4.0, 4.0)) == ["NewEpoch"] + ["Store"] * 7
    assert (state.trust(4.0), state.last_seq) == (PROBED, 6)
