"""The values that cross the border of the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cache_index.identity import ModelIdentity

__all__ = [
    "DEVICE",
    "HOST",
    "Holder",
    "ListenerStatus",
    "SourceKey",
    "SourceSpec",
    "SourceStatus",
    "Trust",
]

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

    `endpoint` and `replay_endpoint` are ZMQ addresses to connect to. With `dials` the publisher
    connects to us: `endpoint` is then the address to bind, shared with other publishers, and
    `topic` or one of `names` tells whose a message is: a name is a whole topic, or the middle of
    `kv@NAME@MODEL`. `hint` says what an operator should know while nobody is connected.
    """

    replica: str
    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    model: ModelIdentity
    dials: bool = False
    names: tuple[str, ...] = ()
    hint: str = ""

    @property
    def key(self) -> SourceKey:
        return SourceKey(self.replica, self.rank)


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What is known about one source now. Ages are seconds; `unit_tokens` is the engine's block.

    `lag_s` is the age of the last live batch when it was taken, by the engine's clock and ours.
    `counts` are incidents by kind, `malformed` what could not be read, by reason.
    """

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
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""
    dials: bool = False
    connected: bool = False
    blocks: int = 0
    lag_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    malformed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListenerStatus:
    """A bound socket that publishers dial. `unknown` topics are some of those nobody declared."""

    endpoint: str
    bound: bool
    reason: str
    connections: int
    topics: int
    unknown: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
