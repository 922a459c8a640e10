"""One publisher of KV events as a pure state machine: no sockets, no clock, no Redis.

It turns deliveries (live ones and replayed ones) into operations on the index, keeps the map from
the engine's hashes to our own, and says how far the source can be trusted.

The rules, all on the side of under-reporting:

- A life begins at sequence 0. A lower sequence, or another digest at a known one, is another life;
  so is what follows when a publisher says that it ends (SGLang does).
- After a gap or a reconnect nothing live is applied until a replay from the last sequence
  *inclusive* has shown the same digest; another digest, or no batch at all, is another life.
  Meanwhile the source is not EXACT. A mere probe, asked though nothing is known to be missing,
  holds nothing back that continues what is known.
- What a replay can no longer give is lost, removals among it: everything of the source is dropped
  and it goes on as PARTIAL until the engine clears its cache.
- Trust lasts for one lease. A batch renews it, and so does a replay that ran to its END. Without a
  replay endpoint only an unbroken connection can vouch for an idle source (`vouch`): the end of the
  connection ends the trust at once, and a reconnect drops everything.
"""

from __future__ import annotations

from collections import deque

from cache_index.history import History
from cache_index.identity import ModelIdentity
from cache_index.ledger import Operation
from cache_index.replay import Delivery, Replay, Verdict
from cache_index.types import Trust

__all__ = ["Delivery", "SourceState"]

# Live batches held back during a replay. What does not fit is fetched by the next replay.
_MAX_PENDING = 1024
# After so many replays without an answer the source goes on as if it had no replay endpoint.
_REPLAY_ATTEMPTS = 2
# A publisher's socket may drop part of a long answer; asking again from there brings the rest. So
# many answers in a row that bring nothing mean that the rest does not exist any more.
_TORN_ATTEMPTS = 3


class SourceState(History):
    """Sequence, life and trust of one publisher."""

    def __init__(
        self, model: ModelIdentity, *, base_unit_tokens: int, lease_s: float, replayable: bool
    ) -> None:
        super().__init__(model, base_unit_tokens=base_unit_tokens, lease_s=lease_s)
        self._replayable = replayable
        self._degraded = False
        self._failures = 0
        self._torn = 0
        self._replay: Replay | None = None
        self._replay_wanted = replayable
        self._void_after_replay = ""
        self._pending: deque[tuple[Delivery, float]] = deque(maxlen=_MAX_PENDING)
        self._connected = False

    @property
    def replay_wanted(self) -> bool:
        """Something is missing or unproven that only a replay can settle."""
        return self._replay_wanted

    @property
    def connected_now(self) -> bool:
        """The live socket has a peer."""
        return self._connected

    @property
    def _alone(self) -> bool:
        """There is no replay to ask."""
        return not self._replayable or self._degraded

    def trust(self, now_s: float) -> tuple[Trust, str]:
        """How far the source's entries count now, and why not further."""
        level, reason = super().trust(now_s)
        if level is not Trust.EXACT:
            return level, reason
        if self._degraded:
            return Trust.PARTIAL, "its replay does not answer"
        if self._replay_wanted or self._pending or (self._replay and not self._replay.probe):
            return Trust.PARTIAL, "a replay is under way"
        return level, reason

    # -- live deliveries

    def live(self, delivery: Delivery, now_s: float) -> list[Operation]:
        """Take one message from the live stream."""
        operations: list[Operation] = []
        # Until all is told anew what is known goes on, and whatever comes now is new to that.
        unanswered = self._replay is not None and self._replay.rebuild
        waits = self._must_wait(delivery)
        if waits:
            self._hold(delivery, now_s)
        if unanswered or not waits:
            self._live(delivery, now_s, operations)
        return operations

    def _must_wait(self, delivery: Delivery) -> bool:
        """Whether only a replay can say what this message means."""
        if self._replay is None:
            return self._replay_wanted and not self._degraded
        if not self._replay.probe or self._replay_wanted or self._pending:
            return True
        # What follows on something that waits may be another life's, whatever its number.
        return delivery.seq != self.last_seq + 1 and not self._known(delivery)

    def _live(self, delivery: Delivery, now_s: float, out: list[Operation]) -> None:
        seq = delivery.seq
        if self.last_seq >= 0 and seq <= self.last_seq:
            if self._known(delivery):
                self.counts["duplicate"] += 1
                return
            self.standing.fell(now_s)
            self._begin_life("restart", out)
        if seq != self.last_seq + 1 and self._miss(delivery, now_s, out):
            return
        self._apply(delivery, now_s, out)
        self.standing.renew(now_s)

    def _miss(self, delivery: Delivery, now_s: float, out: list[Operation]) -> bool:
        """Batches before this one are missing. True if a replay must bring them first."""
        self.counts["gap"] += 1
        self.counts["missing"] += delivery.seq - self.last_seq - 1
        if not self._alone:
            self._replay_wanted = True
            self._hold(delivery, now_s)
            return True
        if self.last_seq >= 0:
            self._drop("gap", out)
        else:
            self.standing.partial_reason = "joined after its first batch"
        return False

    def _hold(self, delivery: Delivery, arrived_s: float) -> None:
        if len(self._pending) == self._pending.maxlen:
            self.counts["held_back_overflow"] += 1
        self._pending.append((delivery, arrived_s))

    # -- replay

    def begin_replay(self) -> int:
        """Start a replay; returns the sequence to ask for.

        What was held back until now is in the replay too, if the same publisher answers it; if
        another one does, it must not be applied at all.
        """
        self._pending.clear()
        rebuild = self._degraded
        self._replay = Replay(
            confirming=self.last_seq >= 0 and not rebuild,
            rebuild=rebuild,
            probe=not self._replay_wanted and not rebuild,
            asked=(self.last_seq, self._last_digest),
        )
        return 0 if rebuild else max(0, self.last_seq)

    def replayed(self, delivery: Delivery, now_s: float) -> list[Operation]:
        """Take one message of the answer to a replay request."""
        operations: list[Operation] = []
        replay = self._replay
        if replay is None or replay.other_life or replay.torn:
            return operations
        if replay.rebuild:
            replay.rebuild = False
            self._begin_life("replay is back", operations)
            # What comes now may be old; only END shows that it is all.
            self.standing.cut_off = "its replay has not ended"
        elif replay.confirming:
            verdict = replay.confirm(delivery, self.last_seq, known=self._known(delivery))
            # From here on it is no mere probe, unless it goes on as asked for.
            replay.probe &= verdict is Verdict.SAME_LIFE
            if verdict is Verdict.OTHER_LIFE:
                self._begin_life("restart", operations)
            if verdict is not Verdict.NEWS:
                return operations
            # The batch we know has left the buffer: whose the next one is, nobody can say.
            self._start_over("past the replay buffer", operations)
        self._take_replayed(replay, delivery, now_s, operations)
        return operations

    def _take_replayed(
        self, replay: Replay, delivery: Delivery, now_s: float, out: list[Operation]
    ) -> None:
        if delivery.seq <= self.last_seq:
            self.counts["duplicate"] += 1
            return
        if delivery.seq != self.last_seq + 1:
            if (replay.taken or replay.confirmed) and self._torn < _TORN_ATTEMPTS:
                replay.torn, replay.probe = True, False
                self.counts["replay_torn"] += 1
                return
            if self.last_seq >= 0:
                self._drop("past the replay buffer", out)
            elif not self.standing.partial_reason:
                self.standing.partial_reason = "older batches have left the replay buffer"
        replay.taken += 1
        self._apply(delivery, now_s, out)

    def end_replay(self, asked_at_s: float, now_s: float) -> list[Operation]:
        """The replay asked for at `asked_at_s` has answered END: the source is current as of then.

        The request, not the answer, dates the proof: the publisher had nothing newer when it
        served it, which was not before it was sent.
        """
        operations: list[Operation] = []
        replay, self._replay = self._replay, None
        if replay is None:
            return operations
        self._failures = 0
        if replay.confirming or replay.rebuild:
            # Not even the batch we know: this publisher is another one.
            self._begin_life("restart", operations)
            replay.other_life = True
        self._degraded = False
        self._replay_wanted = replay.other_life or replay.torn or replay.outdated
        self._torn = self._torn + 1 if replay.torn and not replay.taken else 0
        if self._replay_wanted:
            return operations
        if self.last_seq < 0:
            self.standing.complete = True
        self.standing.renew(asked_at_s)
        self._void_late(operations)
        self._release(operations)
        return operations

    def fail_replay(self, now_s: float) -> list[Operation]:
        """No END within the deadline. Goes on without replay after a few of these."""
        operations: list[Operation] = []
        replay, self._replay = self._replay, None
        self.counts["replay_failed"] += 1
        if replay is not None and replay.rebuild:
            self._pending.clear()
        # An answer that only lost its END goes on where it stopped.
        self._failures = 0 if replay is not None and replay.taken else self._failures + 1
        if self._failures >= _REPLAY_ATTEMPTS and self._replay_wanted and not self._degraded:
            self._degraded = True
            self._start_over("replay does not answer", operations)
        elif self._degraded and replay is not None and replay.taken:
            # It is a part, and what was removed since may be in the rest.
            self._start_over("replay does not answer", operations)
        if self._degraded or not self._replay_wanted:
            self._void_late(operations)
            self._release(operations)
        return operations

    def _release(self, out: list[Operation]) -> None:
        held, self._pending = self._pending, deque(maxlen=_MAX_PENDING)
        for delivery, arrived_s in held:
            if self._replay_wanted and not self._degraded:
                self._hold(delivery, arrived_s)
            else:
                # It proves what it proved when it came, not now.
                self._live(delivery, arrived_s, out)

    # -- connection

    def connected(self, now_s: float) -> list[Operation]:
        """The live socket is connected, for the first time or again."""
        operations: list[Operation] = []
        again = self.standing.proof_at_s is not None
        self._connected = True
        self.standing.connected()
        # Held back from the last connection: it may be another publisher's.
        self._pending.clear()
        if self._replay is not None:
            self._replay.outdated = True
        if self._replayable:
            self._replay_wanted = True
        if again and self._alone:
            # Who knows what was published, or by whom, while nobody listened.
            self._drop("reconnected without replay", operations)
            self.last_seq = -1
        return operations

    def disconnected(self) -> None:
        """The live socket has lost its peer."""
        self._connected = False
        if self._alone:
            # Nothing can prove afterwards that the peer which comes back is the same.
            self.standing.cut_off = "its connection is gone, and there is no replay"

    def vouch(self, now_s: float) -> None:
        """Renew by an unbroken connection, where there is no replay to ask."""
        if self._connected and self._alone:
            if self.standing.complete is None:
                self.standing.lose("joined without replay")
            self.standing.renew(now_s)

    # -- said from outside the stream

    def publisher_reset(self) -> list[Operation]:
        """The publisher has said that this was its last message: what comes is another life."""
        operations: list[Operation] = []
        self._pending.clear()
        if self._replay is not None:
            # Its answer may be the old life's.
            self._replay.other_life, self._replay.probe = True, False
        self._begin_life("publisher reset", operations)
        return operations

    def void(self, reason: str) -> list[Operation]:
        """Forget what it holds, though its events still say so: its engine has emptied its cache.

        Engines tell that with their next step only. What a replay under way brings is void too.
        """
        operations: list[Operation] = []
        if self._replay is not None:
            self._void_after_replay = reason
            self._replay.probe = False
        if len(self.ledger) or self._replay is not None:
            self._drop(reason, operations)
        return operations

    def _void_late(self, out: list[Operation]) -> None:
        reason, self._void_after_replay = self._void_after_replay, ""
        if reason:
            self._drop(reason, out)
