"""The replicas and what is known of each: health, models, ranks, KV event publishers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cache_index.identity import ModelIdentity
from cache_index.types import SourceSpec
from router.config import KvEventsConfig, ReplicaConfig, Settings
from router.upstream import ReplicaPool


@dataclass(slots=True)
class ServedModel:
    """One name under which a replica serves: its base model, and the adapter if it is one."""

    base: str
    adapter: str
    card: dict[str, Any]


@dataclass(slots=True)
class Replica:
    """One serving engine. Written by the prober and by the relay's failures, read by all."""

    name: str
    url: str
    pool: ReplicaPool
    base_path: bytes
    declared_events: list[KvEventsConfig] | None
    healthy: bool = False
    reason: str = "not probed yet"
    ranks: tuple[int, ...] = (0,)
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    sources: tuple[SourceSpec, ...] = ()

    @classmethod
    def from_config(cls, config: ReplicaConfig, settings: Settings) -> Replica:
        """A replica that has not been probed yet."""
        parts = urlsplit(config.url)
        pool = ReplicaPool(
            parts.hostname or "",
            parts.port or 80,
            connect_timeout_s=settings.connect_timeout_s,
            keepalive_s=settings.keepalive_s,
        )
        return cls(config.name, config.url, pool, parts.path.encode(), config.kv_events)

    @property
    def netloc(self) -> bytes:
        """The Host header."""
        return urlsplit(self.url).netloc.encode()

    @property
    def ranked(self) -> bool:
        """Whether a request must say which data-parallel rank it is for."""
        return len(self.ranks) > 1

    def failed(self, reason: str) -> None:
        """A request could not reach it: nothing is sent there until a probe succeeds."""
        self.healthy = False
        self.reason = reason


class Fleet:
    """All replicas, by name."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self.replicas = {replica.name: replica for replica in replicas}

    def serving(self, model: str) -> list[Replica]:
        """Healthy replicas that serve a model name."""
        return [r for r in self.replicas.values() if r.healthy and model in r.models]

    def model_names(self) -> list[str]:
        """Every model name that any replica is known to serve, sorted."""
        return sorted({name for replica in self.replicas.values() for name in replica.models})

    def known(self, model: str) -> bool:
        """Whether any replica, healthy or not, is known to serve the model."""
        return any(model in replica.models for replica in self.replicas.values())

    def model_cards(self) -> list[dict[str, Any]]:
        """The union of the healthy replicas' model cards, each with who serves it."""
        cards: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            for name, model in replica.models.items() if replica.healthy else ():
                card = cards.setdefault(name, {**model.card, "kvroute_replicas": []})
                card["kvroute_replicas"].append(replica.name)
        return list(cards.values())

    def any_healthy(self) -> bool:
        """Whether at least one replica can take a request."""
        return any(replica.healthy for replica in self.replicas.values())

    def source_specs(self) -> list[SourceSpec]:
        """The KV event publishers of all replicas."""
        return [spec for replica in self.replicas.values() for spec in replica.sources]


def served_models(listing: Any) -> dict[str, ServedModel]:
    """A replica's GET /v1/models, by name; an adapter's card names its parent.

    Without adapters all names are aliases of the first one: they share one KV cache.
    """
    data = listing.get("data") if isinstance(listing, dict) else None
    cards = [card for card in data or () if isinstance(card, dict) and card.get("id")]
    bases = [card["id"] for card in cards if not card.get("parent")]
    models = {}
    for card in cards:
        adapter = card["id"] if card.get("parent") else ""
        models[card["id"]] = ServedModel(bases[0] if bases else card["id"], adapter, card)
    return models


def source_specs(
    name: str, host: str, publishers: Sequence[KvEventsConfig], model: ModelIdentity
) -> tuple[SourceSpec, ...]:
    """Index sources of one replica; a wildcard address means the replica's own host."""
    return tuple(
        SourceSpec(
            replica=name,
            rank=publisher.rank,
            endpoint=dialable(publisher.endpoint, host),
            replay_endpoint=dialable(publisher.replay_endpoint, host)
            if publisher.replay_endpoint
            else None,
            topic=publisher.topic,
            model=model,
        )
        for publisher in publishers
    )


def dialable(endpoint: str, host: str) -> str:
    """A publisher's bind address as a subscriber connects to it."""
    wrapped = f"[{host}]" if ":" in host else host
    for wildcard in ("://*:", "://0.0.0.0:", "://[::]:"):
        endpoint = endpoint.replace(wildcard, f"://{wrapped}:")
    return endpoint


def listed_publishers(listing: Any) -> list[KvEventsConfig]:
    """GET /kv_event_sources: publishers by data-parallel rank; what is malformed is left out."""
    found = []
    for rank, entry in listing.items() if isinstance(listing, dict) else ():
        if str(rank).isdigit() and isinstance(entry, dict) and entry.get("endpoint"):
            found.append(
                KvEventsConfig(
                    rank=int(rank),
                    endpoint=str(entry["endpoint"]),
                    replay_endpoint=entry.get("replay_endpoint"),
                    topic=str(entry.get("topic") or ""),
                )
            )
    return found
