"""The values that cross the border of the index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cache_index.identity import ModelIdentity

__all__ = ["DEVICE", "HOST", "Holder", "SourceKey", "SourceSpec", "SourceStatus", "Trust"]

DEVICE = "device"
HOST = "host"


class Holder(NamedTuple):
    """Who holds a prefix: one tier of one data-parallel rank of one replica."""

    replica: str
    rank: int
    tier: str


class SourceKey(NamedTuple):
    """Names a publisher of KV events across its lives."""

    replica: str
    rank: int


class Trust(StrEnum):
    """How far a source's entries can be relied on.

    PARTIAL may under-report and never over-reports; NONE means routed on load alone.
    """

    EXACT = "exact"
    PARTIAL = "partial"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One publisher of KV events, as the gateway declares it.

    `endpoint` and `replay_endpoint` are ZMQ addresses to connect to.
    """

    replica: str
    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    model: ModelIdentity

    @property
    def key(self) -> SourceKey:
        return SourceKey(self.replica, self.rank)


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What is known about one source now. Ages are seconds; `unit_tokens` is the engine's block."""

    replica: str
    rank: int
    trust: Trust
    reason: str
    epoch: int
    last_seq: int
    batches: int
    unit_tokens: int | None
    last_batch_age_s: float | None
    leading: bool
