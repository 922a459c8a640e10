"""What goes into the engine core and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from loadgen.replica.errors import EngineError
from loadgen.replica.events import KVEvent


class SchedulingPolicy(StrEnum):
    """Order of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One rank's size and speed.

    A prompt of n uncached tokens behind m cached ones costs
    `prefill_c_s + prefill_cached_s * m + prefill_a_s * n + prefill_b_s * (n*n + 2*n*m)` seconds
    however it is cut into chunks: the first two are paid with the first chunk. A step in which B
    requests decode costs `decode_step_s + decode_per_request_s * B` more.

    `ignore_salts`: `cache_salt` keeps nothing apart, as with an engine that does not know it.
    """

    block_size_tokens: int = 16
    blocks: int = 4096
    prefill_c_s: float = 0.015
    prefill_a_s: float = 1.326e-4
    prefill_b_s: float = 8.35e-10
    prefill_cached_s: float = 0.0
    decode_step_s: float = 0.012
    decode_per_request_s: float = 0.0002
    max_batched_tokens: int = 2048
    max_num_seqs: int = 64
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    prefix_caching: bool = True
    ignore_salts: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "blocks", "max_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1")
        if self.max_batched_tokens < self.max_num_seqs:
            raise EngineError("max_batched_tokens must be at least max_num_seqs")

    @property
    def capacity_tokens(self) -> int:
        """Tokens the block cache holds."""
        return self.blocks * self.block_size_tokens

    def prefill_s(self, new_tokens: int, before_tokens: int, *, first: bool) -> float:
        """Cost of computing `new_tokens` behind `before_tokens` that are already there."""
        quadratic = new_tokens * (new_tokens + 2 * before_tokens)
        constant = self.prefill_c_s + self.prefill_cached_s * before_tokens if first else 0.0
        return constant + self.prefill_a_s * new_tokens + self.prefill_b_s * quadratic

    def decode_s(self, batch: int) -> float:
        """Cost of one decode round of `batch` requests."""
        return self.decode_step_s + self.decode_per_request_s * batch if batch else 0.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation. `reply_ids`, when given, are its tokens instead of `reply_tokens`.

    `hashes` may carry the prompt's block hashes where they are known (`Engine.hashes`).
    A lower `priority` is served earlier, under the priority policy only.
    """

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    reply_ids: Sequence[int] | None = None
    hashes: Sequence[int] | None = None
    session_id: str = ""


class FirstToken(NamedTuple):
    """What became known with a request's first token.

    `created_tokens` are those of the prompt's full blocks that were not cached.
    """

    cached_tokens: int
    arrived_s: float
    admitted_s: float
    created_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """What one engine step did; all of it is true from `end_s` on.

    `emitted` maps request id to new tokens (1, or `rounds` after a run of decode rounds),
    `first` those of them that emitted their first token, `finished` those that emitted their
    last one.
    """

    start_s: float
    duration_s: float = 0.0
    rounds: int = 1
    emitted: dict[str, int] = field(default_factory=dict)
    first: dict[str, FirstToken] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    prefilled_tokens: int = 0
    events: Sequence[KVEvent] = ()

    @property
    def end_s(self) -> float:
        """When the step's tokens leave the engine."""
        return self.start_s + self.duration_s


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, in tokens unless the name says otherwise."""

    queries: int = 0
    hits: int = 0
    prompt: int = 0
    computed: int = 0
    cached: int = 0
    generated: int = 0
    preemptions_total: int = 0
