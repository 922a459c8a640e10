"""Routes that answer at once: tokens, and the state of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from loadgen.replica.answering import respond_json as send
from loadgen.replica.answers import VERSION, ChatFormat, CompletionFormat, random_id
from loadgen.replica.errors import InvalidBody
from loadgen.replica.http import Exchange
from loadgen.replica.metrics import Collector, exposition
from loadgen.replica.prompts import PromptReader
from loadgen.replica.publisher import PUB_HWM_MESSAGES, SourceAddress
from loadgen.replica.rank import RankRunner
from loadgen.replica.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
    check_chat,
    check_completion,
    parse,
    plain_messages,
)
from loadgen.replica.routing import Route
from loadgen.replica.setup import Setup

_LISTS_SOURCES = (0, 31)


def send_nothing(exchange: Exchange) -> None:
    """Answer 200 with an empty body."""
    exchange.respond(200, b"")


class TokenRoutes:
    """Tokenizing and rendering without generating."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._tokenizer = reader.tokenizer

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/chat/completions/render", self._render_chat),
            Route("POST", "/v1/completions/render", self._render_completion),
            Route("POST", "/tokenize", self._tokenize),
            Route("POST", "/detokenize", self._detokenize),
        ]

    def _render_chat(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, ChatRequest)
        check_chat(request)
        self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, ChatFormat.id_prefix)
        ids = self._reader.chat_ids(request)
        send(exchange, _rendered(frame.id, frame.model, ids, request))

    def _render_completion(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, CompletionRequest)
        check_completion(request, self._tokenizer.size)
        self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, CompletionFormat.id_prefix)
        prompts = self._reader.completion_ids(request)
        suffixes = [f"-{place}" for place in range(len(prompts))] if len(prompts) > 1 else [""]
        send(
            exchange,
            [
                _rendered(f"{frame.id}{suffix}", frame.model, ids, request)
                for suffix, ids in zip(suffixes, prompts, strict=True)
            ],
        )

    def _tokenize(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, TokenizeRequest)
        self._reader.adapter(request.model)
        ids = self._tokenizer.encode(self._text_to_tokenize(request))
        strings = [self._tokenizer.token_name(token) for token in ids]
        send(
            exchange,
            {
                "count": len(ids),
                "max_model_len": self._reader.served.max_model_len_tokens,
                "tokens": ids,
                "token_strs": strings if request.return_token_strs else None,
            },
        )

    def _text_to_tokenize(self, request: TokenizeRequest) -> str:
        if request.messages is not None:
            return self._tokenizer.render(
                plain_messages(request.messages, self._reader.served.model),
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                arguments=request.chat_template_kwargs,
            )
        if request.prompt is None:
            raise InvalidBody("body.prompt", "Field required")
        return request.prompt

    def _detokenize(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, DetokenizeRequest)
        self._reader.adapter(request.model)
        known = [token for token in request.tokens if token < self._tokenizer.size]
        send(exchange, {"prompt": self._tokenizer.decode(known)})


class StateRoutes:
    """Models, health, metrics and the addresses of KV events."""

    def __init__(
        self,
        reader: PromptReader,
        ranks: Sequence[RankRunner],
        collector: Collector,
        in_flight: Callable[[], int],
        setup: Setup = Setup(),
    ) -> None:
        self._served = reader.served
        self._ranks = ranks
        self._collector = collector
        self._in_flight = in_flight
        self._setup = setup

    def routes(self) -> list[Route]:
        """What this part answers."""
        routes = [
            Route("GET", "/v1/models", self._models),
            Route("GET", "/health", send_nothing),
            Route("GET", "/ping", send_nothing),
            Route("POST", "/ping", send_nothing),
            Route("GET", "/version", self._version),
            Route("GET", "/load", self._load),
            Route("GET", "/metrics", self._metrics),
            Route("POST", "/reset_prefix_cache", self._reset_prefix_cache),
        ]
        if self._setup.since(*_LISTS_SOURCES):
            routes.append(Route("GET", "/kv_event_sources", self._kv_event_sources))
        return routes

    def _models(self, exchange: Exchange) -> None:
        model = self._served.model
        cards = [self._card(model, None)]
        cards += [self._card(name, model) for name in self._served.adapters]
        send(exchange, {"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> dict[str, Any]:
        length = self._served.max_model_len_tokens if parent is None else None
        return {
            "id": name,
            "object": "model",
            "created": self._served.started_s,
            "owned_by": self._served.owner,
            "root": name,
            "parent": parent,
            "max_model_len": length,
            "permission": [_permission(self._served.started_s)],
        }

    def _version(self, exchange: Exchange) -> None:
        send(exchange, {"version": self._setup.version or VERSION})

    def _load(self, exchange: Exchange) -> None:
        send(exchange, {"server_load": self._in_flight()})

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, exposition(self._collector), CONTENT_TYPE_LATEST)

    def _kv_event_sources(self, exchange: Exchange) -> None:
        sources = {}
        for number, rank in enumerate(self._ranks[: self._setup.listed_ranks]):
            address = rank.publisher.address
            if address is not None:
                sources[str(number)] = listed_source(address, self._setup.listed_host)
        send(exchange, sources)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        # As in vLLM, the answer is 200 even where requests in flight prevent it.
        done = [rank.reset_prefix_cache() for rank in self._ranks]
        send(exchange, {"success": all(done)})


def _permission(created_s: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{random_id()}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def listed_source(address: SourceAddress, host: str) -> dict[str, Any]:
    """A publisher's addresses as an engine's configuration has them."""
    # vLLM reports the address it was configured with, and that is a wildcard wherever it
    # binds: clients put the replica's host in its place. Only `tcp://*:0` tells a host.
    endpoint, replay = (f"tcp://{host}:{each.rpartition(':')[2]}" for each in address[:2])
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint if address.bound else address.endpoint,
        "replay_endpoint": replay,
        "buffer_steps": address.buffer_steps,
        "hwm": PUB_HWM_MESSAGES,
        "max_queue_size": PUB_HWM_MESSAGES,
        "topic": address.topic,
    }


def _rendered(
    request_id: str, model: str, ids: list[int], request: GenerationFields
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {"n": request.n or 1, "max_tokens": request.limit()},
        "model": model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(request.stream),
        "stream_options": None,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
