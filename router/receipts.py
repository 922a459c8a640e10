"""What the last requests were decided on and what became of them, kept as plain values.

A request pays for one tuple in a bounded ring; what it means is worked out by `receipt.py` when
somebody asks. Nothing of a prompt is kept: neither its text nor its tokens, and its salt only as a
digest under a key of this process. Nor is a replica or a connection, which may be gone by then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from os import urandom
from typing import Any, NamedTuple

from router.call import Attempt, Call
from router.placement import RootMatch
from router.policy import Candidate, Choice, Snapshot

MAX_PATH = 256
"""Characters kept of a path; a longer one is a client's own invention."""
SALT_BYTES = 8


class Kept(NamedTuple):
    """One request. Seconds count from the last byte of its body; `ended_at_s` is Unix time.

    `snapshot` and `choice` are None when it ended before a replica was chosen; `first_token_s`
    counts from the sending and is known of streams alone.
    """

    request_id: bytes
    ended_at_s: float
    running: bool
    method: str
    path: str
    model: str | None
    salt: str
    source: str
    prompt_tokens: int
    streaming: bool
    reason: str
    on_trial: bool
    roots: Sequence[RootMatch]
    trust: Mapping[tuple[str, int], str]
    snapshot: Snapshot | None
    choice: Choice | None
    attempts: Sequence[Attempt]
    status: int
    error_code: str
    routing_s: float
    first_byte_s: float | None
    first_token_s: float | None
    total_s: float
    cached_tokens: int | None
    engine_prompt_tokens: int | None

    @property
    def chosen(self) -> Candidate | None:
        """The rank that it was sent to last, as it was known then."""
        if self.snapshot is None or self.choice is None:
            return None
        return self.snapshot.candidates[self.choice.chosen]

    @property
    def replica(self) -> str | None:
        """The replica of that rank."""
        chosen = self.chosen
        return chosen.replica if chosen is not None else None


class Receipts:
    """The last `limit` requests that have ended, and those that run; 0 keeps none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._running: dict[Call, None] = {}
        self._key = urandom(16)

    def __len__(self) -> int:
        return len(self._ended)

    def began(self, call: Call) -> None:
        """A request is being served."""
        if self.limit:
            self._running[call] = None

    def ended(self, call: Call) -> None:
        """It has ended, whatever became of it."""
        if self.limit:
            del self._running[call]
            self._ended.append(self._values(call, running=False))

    def newest_first(self) -> Iterator[Kept]:
        """Those that run, and then those that have ended."""
        for call in reversed(self._running):
            yield self.kept(call, running=True)
        yield from map(Kept._make, reversed(self._ended))

    def of(self, request_id: bytes) -> list[Kept]:
        """Every request of this id that is known, the newest first."""
        return [each for each in self.newest_first() if each.request_id == request_id]

    def kept(self, call: Call, *, running: bool) -> Kept:
        """A request as it stands now."""
        return Kept._make(self._values(call, running=running))

    def _values(self, call: Call, *, running: bool) -> tuple[Any, ...]:
        """The fields of a `Kept` in their order; unnamed, which takes a fifth of the time."""
        plan, placement = call.plan, call.placement
        now_s = time.perf_counter()
        since_s = call.arrived_at_s or call.started_at_s
        return (
            call.request_id,
            time.time(),
            running,
            call.method,
            call.path[:MAX_PATH],
            plan.model if plan else call.model,
            self._digest(plan.prompt.salt) if plan and plan.prompt.salt else "",
            plan.prompt.source if plan else "none",
            plan.prompt.tokens if plan else 0,
            plan.streaming if plan else False,
            plan.reason if plan else "",
            call.on_trial,
            plan.roots if plan else (),
            plan.trust if plan else {},
            placement.snapshot if placement else None,
            placement.choice if placement else None,
            call.attempts,
            call.status,
            call.error_code,
            call.routing_s,
            call.first_byte_at_s - since_s if call.first_byte_at_s else None,
            call.first_token_s,
            now_s - since_s,
            call.cached_tokens,
            call.engine_prompt_tokens,
        )

    def _digest(self, salt: str) -> str:
        """The same for equal salts, and of no use to whoever wants to guess one."""
        data = salt.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=SALT_BYTES, key=self._key).hexdigest()
