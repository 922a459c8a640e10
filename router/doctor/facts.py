"""What was seen of a replica: plain values, which can be kept, compared and judged again.

None stands for "not known" everywhere: what an engine does not tell is never a finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from router.engines import EngineKind

Ids = tuple[int, ...]
GATEWAY = "a kvroute gateway answers there, not an engine"


class Listing(StrEnum):
    """Where a replica's publishers are known from.

    EMPTY: it was asked and has none. UNTOLD: it does not answer such a question.
    """

    DECLARED = "declared"
    LISTED = "listed"
    EMPTY = "empty"
    UNTOLD = "untold"


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector to a pool: its name, and the transfer mode it was given if any."""

    name: str
    mode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One rank's publisher. `endpoint` and `replay_endpoint` as they are connected to.

    `connected`: a ZMQ handshake succeeded. `replays`: a replay ran to its end. `dials`: it connects
    to the gateway's socket by design, so that the doctor cannot hear it.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    connected: bool
    replays: bool = False
    dials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the publishers said of a request that was sent to one rank.

    `on_rank` is whose publisher said it (None: nobody), `said_rank` the rank in the message.
    `tokens` is the chain of stored blocks from its start. `late_s` is how long before its arrival
    the message was stamped by the engine's clock: negative when that clock is ahead. `pool`: blocks
    of the prompt were announced in a pool, `pool_unsalted`: without the salt.
    """

    rank: int
    on_rank: int | None = None
    said_rank: int | None = None
    topic: str = ""
    tokens: Ids = ()
    block_tokens: frozenset[int] = frozenset()
    salted: bool = False
    pool: bool = False
    pool_unsalted: bool = False
    late_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Tiny requests that were sent: one prompt twice under one salt, once under another.

    `cached` are the tokens said to be reused by each of the three, None where nothing was said.
    `expected` are the prompt's ids by our own tokenizer. `unreadable`: messages or events that
    could not be read meanwhile. `refused` says why there was no answer.
    """

    refused: str = ""
    chat: bool = True
    prompt_tokens: int = 0
    details: bool = False
    cached: tuple[int | None, int | None, int | None] = (None, None, None)
    expected: Ids | None = None
    heard: tuple[Heard, ...] = ()
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of the doctor's fixed texts: plain text, and a short conversation."""

    text: Ids | None = None
    chat: Ids | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """One replica. `trouble` is why it could not be asked; then nothing else is known.

    `endpoints` are the engine's own words for its publishers' addresses. `own` and `said` are the
    ids of the same texts by our tokenizer and by the replica. `clock_ahead_s` is by its answers'
    dates, to about a second.
    """

    name: str
    url: str
    trouble: str = ""
    kind: EngineKind = EngineKind.UNKNOWN
    model: str = ""
    root: str = ""
    max_model_len: int | None = None
    version: str | None = None
    asleep: bool = False
    block_tokens: int | None = None
    prefix_caching: bool | None = None
    dp_size: int | None = None
    connector: Connector | None = None
    listing: Listing = Listing.UNTOLD
    endpoints: tuple[str, ...] = ()
    publishers: tuple[Publisher, ...] = ()
    clock_ahead_s: float | None = None
    own: Tokens = field(default_factory=Tokens)
    said: Tokens = field(default_factory=Tokens)
    probe: Probe | None = None

    @property
    def engine(self) -> str:
        """How the engine is called in a sentence."""
        return {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}.get(self.kind, "the engine")
