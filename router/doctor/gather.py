"""Asks a replica and listens to it until its facts are together. Never raises for what it meets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import zmq

from cache_index.identity import ModelIdentity
from router.config import KvEventsConfig, ReplicaConfig, Settings
from router.doctor.asking import Asker, NoAnswer, Reply
from router.doctor.facts import GATEWAY, Ids, Listing, ReplicaFacts, Tokens
from router.doctor.hearing import unpack
from router.doctor.listening import listening
from router.doctor.probing import Patient, Prober, probable
from router.doctor.reading import (
    cache_info,
    connectors,
    events_off,
    sglang_cache,
    vllm_config,
)
from router.engines import (
    EngineKind,
    engine_kind,
    engine_load,
    is_sglang,
    listed_publishers,
    served_models,
    sglang_publishers,
)
from router.publishers import Bound, Owner, source_specs
from router.templating import RenderError
from router.tokenizing import ModelTokenizer

ANSWER_LIMITS = 6
"""A request that generates may take so many times the limit of a plain question."""
CONNECT_LIMIT_S = 2.0
TEXT = "naïve café 北京 \U0001f642,  two  spaces; 12345 and 0x3F\n\tend"
CHATS: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ],
    # Some templates refuse a system message.
    [{"role": "user", "content": TEXT}],
)


@dataclass(frozen=True, slots=True)
class Examiner:
    """Examines replicas one at a time; what they have in common is here.

    `limit_s` bounds each question, `active` allows requests that generate.
    """

    client: httpx.AsyncClient
    settings: Settings
    tokenizers: Mapping[str, ModelTokenizer]
    limit_s: float
    active: bool

    async def examine(self, config: ReplicaConfig) -> ReplicaFacts:
        """All there is to see of one replica, within some thirty times `limit_s`."""
        facts = ReplicaFacts(name=config.name, url=config.url)
        asker = Asker(self.client, config.url, self.limit_s, self._headers(config))
        try:
            async with asyncio.timeout(self.limit_s * 30):
                return await _Examination(self, asker, config).run(facts)
        except (NoAnswer, TimeoutError, OSError, zmq.ZMQError) as error:
            return replace(facts, trouble=str(error) or "it took too long to examine")

    def tokenizer(self, model: str) -> ModelTokenizer | None:
        """Ours for a base model."""
        return self.tokenizers.get(model) or self.tokenizers.get("")

    def _headers(self, config: ReplicaConfig) -> dict[str, str]:
        key = config.api_key or self.settings.replica_api_key
        return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}


class _Examination:
    """One replica's."""

    def __init__(self, examiner: Examiner, asker: Asker, config: ReplicaConfig) -> None:
        self._examiner = examiner
        self._asker = asker
        self._config = config

    async def run(self, facts: ReplicaFacts) -> ReplicaFacts:
        facts = await self._models(facts)
        if facts.trouble:
            return facts
        facts, publishers = await self._engine(facts)
        facts = await self._tokens(facts)
        identity = ModelIdentity(facts.model)
        url = httpx.URL(facts.url)
        owner = Owner(facts.name, url.host, url.netloc.decode())
        bound = Bound(self._examiner.settings.kv_events_bind)
        declared = facts.listing is Listing.DECLARED
        specs = source_specs(owner, publishers, identity, bound, declared=declared)
        limit_s = min(self._examiner.limit_s, CONNECT_LIMIT_S)
        async with listening(specs, limit_s) as ears:
            facts = replace(facts, publishers=ears.publishers)
            if not self._examiner.active or facts.asleep or not probable(facts.block_tokens):
                return facts
            tokenizer = self._examiner.tokenizer(facts.model)
            ranks = _ranks(facts)
            ranked = max(len(ranks), facts.dp_size or 1) > 1
            patient = Patient(facts.model, facts.block_tokens, ranks, ranked, tokenizer)
            answer_s = self._examiner.limit_s * ANSWER_LIMITS
            return replace(facts, probe=await Prober(self._asker, ears, patient, answer_s).run())

    async def _models(self, facts: ReplicaFacts) -> ReplicaFacts:
        reply = await self._asker.get("/v1/models")
        models = served_models(reply.json)
        if reply.ours:
            return replace(facts, trouble=GATEWAY)
        if not models:
            said = "lists no model" if reply.ok else f"answered {reply.complaint}"
            return replace(facts, trouble=f"GET /v1/models {said}")
        first = next(iter(models.values()))
        card = models[first.base].card if first.base in models else first.card
        root, length = card.get("root"), card.get("max_model_len")
        return replace(
            facts,
            kind=engine_kind(models.values()),
            model=first.base,
            root=root if isinstance(root, str) else "",
            max_model_len=length if isinstance(length, int) else None,
            clock_ahead_s=reply.ahead_s,
        )

    async def _engine(self, facts: ReplicaFacts) -> tuple[ReplicaFacts, list[Any]]:
        """What it runs and how, and its publishers as the gateway would know them."""
        version, metrics, sources = await asyncio.gather(
            *(self._asker.get_or_none(path) for path in ("/version", "/metrics", _SOURCES))
        )
        text = metrics.text if metrics is not None and metrics.ok else ""
        cache = cache_info(text)
        facts = replace(
            facts,
            version=_text(version, "version"),
            asleep=engine_load(text).sleeping,
            block_tokens=cache.block_tokens,
            prefix_caching=cache.prefix_caching,
            dp_size=cache.dp_size,
        )
        told = sources is not None and isinstance(sources.json, dict)
        listed = listed_publishers(sources.json if sources is not None else None)
        off = False
        if facts.kind is EngineKind.SGLANG or (not told and facts.kind is EngineKind.UNKNOWN):
            facts, info = await self._sglang(facts)
            told, listed = info is not None, sglang_publishers(info)
        else:
            facts, off = await self._vllm(facts)
        declared = self._config.kv_events
        listing = Listing.LISTED if listed else Listing.EMPTY if told or off else Listing.UNTOLD
        if declared is not None:
            listing = Listing.DECLARED
        endpoints = tuple(each.endpoint for each in listed if each.endpoint)
        facts = replace(facts, listing=listing, endpoints=endpoints)
        if listing is Listing.UNTOLD and self._examiner.settings.kv_events_bind:
            return facts, [KvEventsConfig()]
        return facts, listed if declared is None else declared

    async def _sglang(self, facts: ReplicaFacts) -> tuple[ReplicaFacts, Any]:
        for path in ("/server_info", "/get_server_info"):
            reply = await self._asker.get_or_none(path)
            info: Any = reply.json if reply is not None else None
            if is_sglang(info):
                cache = sglang_cache(info)
                version = info.get("version")
                return replace(
                    facts,
                    kind=EngineKind.SGLANG,
                    version=version if isinstance(version, str) else facts.version,
                    block_tokens=cache.block_tokens,
                    prefix_caching=cache.prefix_caching,
                    dp_size=cache.dp_size,
                ), info
        return facts, None

    async def _vllm(self, facts: ReplicaFacts) -> tuple[ReplicaFacts, bool]:
        """Developer mode alone tells the connector. The first such answer may be slow."""
        reply = await self._asker.get_or_none("/server_info?config_format=json")
        config = vllm_config(reply.json if reply is not None else None)
        return replace(facts, connector=connectors(config)), events_off(config)

    async def _tokens(self, facts: ReplicaFacts) -> ReplicaFacts:
        """The same texts tokenized here and there."""
        tokenizer = self._examiner.tokenizer(facts.model)
        own = Tokens() if tokenizer is None else Tokens(unpack(tokenizer.text(TEXT)))
        said = Tokens(await self._tokenized(facts.model, {"prompt": TEXT}))
        for messages in CHATS:
            ids = await self._tokenized(facts.model, {"messages": messages})
            if ids is not None:
                own = replace(own, chat=_rendered(tokenizer, messages))
                said = replace(said, chat=ids)
                break
        return replace(facts, own=own, said=said)

    async def _tokenized(self, model: str, fields: dict[str, Any]) -> Ids | None:
        try:
            reply = await self._asker.post("/tokenize", {"model": model, **fields})
        except NoAnswer:
            return None
        ids = reply.json.get("tokens") if isinstance(reply.json, dict) else None
        if isinstance(ids, list) and all(type(each) is int for each in ids):
            return tuple(ids)
        return None


_SOURCES = "/kv_event_sources"


def _ranks(facts: ReplicaFacts) -> list[int]:
    """Those that have a publisher; else all there are, so that a request names one at least."""
    listed = sorted({each.rank for each in facts.publishers})
    return listed or list(range(facts.dp_size or 1))


def _rendered(tokenizer: ModelTokenizer | None, messages: list[dict[str, str]]) -> Ids | None:
    if tokenizer is None:
        return None
    try:
        return unpack(tokenizer.chat({"messages": messages}))
    except RenderError:
        return None


def _text(reply: Reply | None, name: str) -> str | None:
    body = reply.json if reply is not None else None
    value = body.get(name) if isinstance(body, dict) else None
    return value if isinstance(value, str) else None
