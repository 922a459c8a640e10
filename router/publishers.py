"""From what is known of a replica's KV event publishers to sources that the index can follow.

An engine listens where its endpoint has a wildcard and dials it otherwise. What it dials is ours if
the port is one that we bind: the setting `kv_events_bind`, rank r adding r to the port.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cache_index.identity import ModelIdentity
from cache_index.types import SourceSpec
from router.config import KvEventsConfig
from router.engines import dialable

__all__ = ["Bound", "Owner", "source_specs"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The address of `kv_events_bind`; None when nothing is bound."""

    endpoint: str | None = None

    @property
    def port(self) -> int | None:
        """Of a TCP address."""
        return _port(self.endpoint) if self.endpoint else None

    def at(self, offset: int) -> str:
        """The socket for a rank whose engine adds `offset` to the port; empty without a setting."""
        if self.endpoint is None or self.port is None:
            return self.endpoint or ""
        return f"{self.endpoint.rpartition(':')[0]}:{self.port + offset}"

    def dialed(self, endpoint: str, rank: int) -> str | None:
        """Which of our sockets an engine with this endpoint dials; None if it is none of ours."""
        if endpoint == self.endpoint:
            return endpoint
        port = _port(endpoint)
        if port is None or self.port is None:
            return None
        offset = port - self.port
        return self.at(offset) if offset in (0, rank) else None


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica that publishes: `netloc` is host and port of its URL."""

    name: str
    host: str
    netloc: str

    @property
    def names(self) -> tuple[str, ...]:
        """What a topic may call it."""
        return tuple(dict.fromkeys((self.name, self.netloc, self.host)))


def source_specs(
    owner: Owner,
    publishers: Sequence[KvEventsConfig],
    model: ModelIdentity,
    bound: Bound = Bound(),
    *,
    declared: bool = False,
) -> tuple[SourceSpec, ...]:
    """Index sources of one replica; a wildcard address means the replica's own host.

    `declared`: the addresses are the operator's, so they are where we connect; else the engine's
    own, which it may dial.
    """
    return tuple(_spec(owner, each, model, bound, declared) for each in publishers)


def _spec(
    owner: Owner, publisher: KvEventsConfig, model: ModelIdentity, bound: Bound, declared: bool
) -> SourceSpec:
    dialed, hint = _dialed(publisher, bound, declared)
    replay = publisher.replay_endpoint
    names = owner.names if dialed is not None and not publisher.topic else ()
    return SourceSpec(
        replica=owner.name,
        rank=publisher.rank,
        endpoint=dialable(publisher.endpoint or "", owner.host) if dialed is None else dialed,
        replay_endpoint=dialable(replay, owner.host) if replay else None,
        topic=publisher.topic,
        model=model,
        dials=dialed is not None,
        names=names,
        hint=hint if dialed is None else _unheard(dialed, publisher.topic, names),
    )


def _dialed(publisher: KvEventsConfig, bound: Bound, declared: bool) -> tuple[str | None, str]:
    """Our socket that it dials, or None and what to say while it cannot be reached."""
    if publisher.endpoint is None:
        return bound.at(publisher.rank), ""
    if declared or not _fixed(publisher.endpoint):
        return None, ""
    dialed = bound.dialed(publisher.endpoint, publisher.rank)
    if dialed is not None:
        return dialed, ""
    ours = f"kv_events_bind is {bound.endpoint}" if bound.endpoint else "kv_events_bind is not set"
    return None, (
        f"its engine has the endpoint {publisher.endpoint}: without a wildcard it dials that "
        f"address, where this gateway has no socket ({ours})"
    )


def _unheard(socket: str, topic: str, names: tuple[str, ...]) -> str:
    if not socket:
        return "its publisher dials us, but kv_events_bind is not set"
    wanted = repr(topic) if topic else f"{names[0]!r} or 'kv@{names[0]}@MODEL'"
    return f"not heard live: its engine is to dial {socket} under the topic {wanted}"


def _fixed(endpoint: str) -> bool:
    """Whether an engine dials this address: vLLM and SGLang have the same rule."""
    return endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint


def _port(endpoint: str) -> int | None:
    try:
        return urlsplit(endpoint).port if endpoint.startswith("tcp://") else None
    except ValueError:
        return None
