"""What engines say of themselves, vLLM and SGLang alike, read into plain values.

Whatever comes from a replica may be malformed: what cannot be read is left out, nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import orjson
from pydantic import ValidationError

from router.config import KvEventsConfig

MAX_RANKS = 1024


class EngineKind(StrEnum):
    """What a replica runs."""

    VLLM = "vllm"
    SGLANG = "sglang"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class ServedModel:
    """One name under which a replica serves: its base model, and the adapter if it is one."""

    base: str
    adapter: str
    card: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Gauges of GET /metrics, summed over ranks; None where the engine does not say."""

    running: int | None = None
    waiting: int | None = None
    sleeping: bool = False


def served_models(listing: Any) -> dict[str, ServedModel]:
    """A replica's GET /v1/models, by name; an adapter's card names its parent.

    Without adapters all names are aliases of the first one: they share one KV cache.
    """
    data = listing.get("data") if isinstance(listing, dict) else None
    listed = data if isinstance(data, list) else []
    cards = [card for card in listed if isinstance(card, dict) and _is_name(card.get("id"))]
    bases = [card["id"] for card in cards if not card.get("parent")]
    models = {}
    for card in cards:
        adapter = card["id"] if card.get("parent") else ""
        models[card["id"]] = ServedModel(bases[0] if bases else card["id"], adapter, card)
    return models


def engine_kind(models: Iterable[ServedModel]) -> EngineKind:
    """Both engines sign the cards of their models."""
    for model in models:
        owner = model.card.get("owned_by")
        if owner in (EngineKind.VLLM, EngineKind.SGLANG):
            return EngineKind(owner)
    return EngineKind.UNKNOWN


def listed_publishers(listing: Any) -> list[KvEventsConfig]:
    """GET /kv_event_sources: publishers by data-parallel rank."""
    found = []
    for rank, entry in listing.items() if isinstance(listing, dict) else ():
        if isinstance(entry, dict) and _is_rank(str(rank)):
            found += _publisher(int(rank), entry, offset=0)
    return found


def sglang_publishers(info: Any) -> list[KvEventsConfig]:
    """GET /server_info or /get_server_info of SGLang: rank r adds r to the ports."""
    arguments = _server_args(info)
    given = arguments.get("kv_events_config")
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            return []
    if not isinstance(given, dict) or given.get("publisher") != "zmq":
        return []
    ranks = arguments.get("dp_size")
    count = ranks if isinstance(ranks, int) and 1 <= ranks <= MAX_RANKS else 1
    return [each for rank in range(count) for each in _publisher(rank, given, offset=rank)]


def is_sglang(info: Any) -> bool:
    """Whether an answer to these routes is SGLang's; vLLM has a /server_info of its own."""
    return "kv_events_config" in _server_args(info)


def dialable(endpoint: str, host: str) -> str:
    """A publisher's bind address as a subscriber connects to it."""
    wrapped = f"[{host}]" if ":" in host else host
    for wildcard in ("://*:", "://0.0.0.0:", "://[::]:"):
        endpoint = endpoint.replace(wildcard, f"://{wrapped}:")
    return endpoint


def engine_load(exposition: str) -> EngineLoad:
    """GET /metrics of either engine, without parsing the hundreds of lines that are not needed."""
    return EngineLoad(
        running=_total(exposition, r"vllm:num_requests_running|sglang:num_running_reqs"),
        waiting=_total(exposition, r"vllm:num_requests_waiting|sglang:num_queue_reqs"),
        sleeping=0.0 in _samples(exposition, "vllm:engine_sleep_state", '[^}]*sleep_state="awake"'),
    )


def is_sleeping(answer: Any) -> bool:
    """GET /is_sleeping."""
    return isinstance(answer, dict) and answer.get("is_sleeping") is True


def _server_args(info: Any) -> dict[str, Any]:
    """At the top level or, in some releases, one below."""
    inner = info.get("server_args", info) if isinstance(info, dict) else None
    return inner if isinstance(inner, dict) else {}


def _publisher(rank: int, entry: dict[str, Any], *, offset: int) -> list[KvEventsConfig]:
    """One publisher, or none when its entry cannot be used."""
    endpoint = entry.get("endpoint")
    replay = entry.get("replay_endpoint")
    if not isinstance(endpoint, str) or not endpoint:
        return []
    try:
        return [
            KvEventsConfig(
                rank=rank,
                endpoint=_shifted(endpoint, offset),
                replay_endpoint=_shifted(replay, offset) if replay else None,
                topic=entry.get("topic") or "",
            )
        ]
    except (ValidationError, ValueError, TypeError):
        return []


def _shifted(endpoint: str, offset: int) -> str:
    """An address with its TCP port raised. Raises ValueError, TypeError."""
    if not isinstance(endpoint, str):
        raise TypeError("an endpoint is a string")
    if not offset or not endpoint.startswith("tcp://"):
        return endpoint
    address, _, port = endpoint.rpartition(":")
    urlsplit(f"http://host:{int(port) + offset}").port  # noqa: B018 - raises when out of range
    return f"{address}:{int(port) + offset}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < MAX_RANKS


def _samples(exposition: str, names: str, labels: str = "[^}]*") -> list[float]:
    pattern = rf"^(?:{names})(?:\{{{labels}[^}}]*\}})? ([0-9.eE+-]+)"
    found = []
    for text in re.findall(pattern, exposition, re.MULTILINE):
        try:
            found.append(float(text))
        except ValueError:
            continue
    return found


def _total(exposition: str, names: str) -> int | None:
    samples = _samples(exposition, names)
    return int(sum(samples)) if samples else None
