"""The HTTP surface of one replica: routes, and the way from a request to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

import orjson

from loadgen.replica.answering import Answer, StreamedAnswer, WholeAnswer
from loadgen.replica.answers import ChatFormat, CompletionFormat, Format, Frame
from loadgen.replica.errors import EngineError, RequestRefused, TokenizerError
from loadgen.replica.generation import Generator
from loadgen.replica.http import Exchange
from loadgen.replica.metrics import ReplicaCollector, exposition
from loadgen.replica.model import EngineModel, EngineRequest
from loadgen.replica.rank import RankRunner
from loadgen.replica.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
    check_chat,
    check_completion,
    completion_prompts,
    parse,
    plain_messages,
)

_VERSION = "0.32.0"
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
_RANK_HEADER = "x-data-parallel-rank"
_WAITING_WEIGHT = 4


@dataclass(frozen=True, slots=True)
class Served:
    """What one replica serves under which names."""

    model: str
    adapters: tuple[str, ...]
    max_model_len_tokens: int
    started_s: int


class ReplicaAPI:
    """Routes of one replica over its ranks; `handle` is the HTTP server's handler."""

    def __init__(
        self,
        served: Served,
        generator: Generator,
        model: EngineModel,
        ranks: Sequence[RankRunner],
    ) -> None:
        self._served = served
        self._generator = generator
        self._tokenizer = generator.tokenizer
        self._ranks = ranks
        self._collector = ReplicaCollector(served.model, model, ranks)
        self._numbers = count()
        self._in_flight = 0
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/chat/completions/render": ("POST", self._render_chat),
            "/v1/completions/render": ("POST", self._render_completion),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", _empty),
            "/ping": ("GET", _empty),
            "/version": ("GET", lambda exchange: _send(exchange, {"version": _VERSION})),
            "/load": ("GET", lambda exchange: _send(exchange, {"server_load": self._in_flight})),
            "/metrics": ("GET", self._metrics),
            "/kv_event_sources": ("GET", self._kv_event_sources),
        }

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""
        try:
            self._route(exchange)
        except RequestRefused as refusal:
            _refuse(exchange, refusal)
        except TokenizerError as error:
            _refuse(exchange, RequestRefused(str(error)))
        except EngineError as error:
            _refuse(exchange, RequestRefused(str(error)))
        except Exception as error:
            _refuse(exchange, RequestRefused(str(error), status=500, kind="InternalServerError"))
            raise

    def _route(self, exchange: Exchange) -> None:
        request = exchange.request
        route = self._routes.get(request.path)
        if route is None:
            raise RequestRefused("Not Found", status=404, kind="Not Found")
        method, handler = route
        if request.method != method and not (request.path == "/ping" and request.method == "POST"):
            raise RequestRefused("Method Not Allowed", status=405, kind="Method Not Allowed")
        handler(exchange)

    # Generation

    def _chat(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        request = parse(exchange.request.body, ChatRequest)
        check_chat(request)
        adapter = self._adapter(request.model)
        frame = self._frame(exchange, request, ChatFormat.id_prefix)
        prompt = self._chat_ids(request)
        form = ChatFormat(request, frame, self._tokenizer)
        self._generate(exchange, request, form, [prompt], adapter)

    def _completion(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        request = parse(exchange.request.body, CompletionRequest)
        check_completion(request)
        adapter = self._adapter(request.model)
        frame = self._frame(exchange, request, CompletionFormat.id_prefix)
        prompts = self._completion_ids(request)
        form = CompletionFormat(request, frame, self._tokenizer)
        self._generate(exchange, request, form, prompts, adapter)

    def _generate(
        self,
        exchange: Exchange,
        request: GenerationFields,
        form: Format,
        prompts: Sequence[Sequence[int]],
        adapter: str,
    ) -> None:
        samples = self._generator.samples(prompts, request)
        rank = self._choose_rank(exchange)
        kind = StreamedAnswer if request.stream else WholeAnswer
        answer = kind(
            exchange,
            form,
            samples,
            per_prompt=request.n or 1,
            usage_wanted=request.usage_wanted(),
            on_done=self._left_flight,
        )
        self._submit(exchange, request, answer, rank, adapter)
        if isinstance(answer, StreamedAnswer):
            answer.begin()

    def _submit(
        self,
        exchange: Exchange,
        request: GenerationFields,
        answer: Answer,
        rank: RankRunner,
        adapter: str,
    ) -> None:
        ids: list[str] = []

        def abort() -> None:
            self._left_flight()
            for request_id in ids:
                rank.abort(request_id)

        for sink in answer.sinks():
            sample = sink.sample
            ids.append(str(next(self._numbers)))
            engine_request = EngineRequest(
                id=ids[-1],
                prompt_ids=sample.prompt_ids,
                max_tokens=len(sample.ids),
                salt=request.cache_salt or "",
                adapter=adapter,
                priority=request.priority,
                reply_ids=sample.ids,
                session_id=request.session_id or "",
            )
            rank.submit(engine_request, sink)
        self._in_flight += 1
        exchange.on_abandoned = abort

    def _left_flight(self) -> None:
        self._in_flight -= 1

    def _choose_rank(self, exchange: Exchange) -> RankRunner:
        wanted = exchange.request.headers.get(_RANK_HEADER)
        if wanted is None or not wanted.strip().lstrip("-").isdigit():
            return min(self._ranks, key=lambda r: r.waiting * _WAITING_WEIGHT + r.running)
        rank = int(wanted)
        if not 0 <= rank < len(self._ranks):
            raise RequestRefused(
                f"data_parallel_rank {rank} is out of range [0, {len(self._ranks)})"
            )
        return self._ranks[rank]

    def _adapter(self, name: str | None) -> str:
        """The adapter a model name stands for, "" for the model itself."""
        if not name or name == self._served.model:
            return ""
        if name in self._served.adapters:
            return name
        raise RequestRefused(
            f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model"
        )

    def _frame(self, exchange: Exchange, request: GenerationFields, prefix: str) -> Frame:
        given = exchange.request.headers.get("x-request-id") or request.request_id
        created_s = int(time.time())
        return Frame(
            prefix + (given or uuid4().hex), created_s, request.model or self._served.model
        )

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        text = self._tokenizer.render(
            plain_messages(request.messages),
            tools=None if request.tool_choice == "none" else request.tools,
            add_generation_prompt=request.add_generation_prompt,
            arguments=request.chat_template_kwargs,
        )
        return self._tokenizer.encode(text)

    def _completion_ids(self, request: CompletionRequest) -> list[list[int]]:
        return [
            self._tokenizer.encode(prompt) if isinstance(prompt, str) else self._checked(prompt)
            for prompt in completion_prompts(request.prompt)
        ]

    def _checked(self, ids: list[int]) -> list[int]:
        for token in ids:
            if not 0 <= token < self._tokenizer.size:
                raise RequestRefused(f"Token id {token} is out of vocabulary", param="prompt")
        return ids

    # Tokens

    def _render_chat(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, ChatRequest)
        check_chat(request)
        self._adapter(request.model)
        frame = self._frame(exchange, request, ChatFormat.id_prefix)
        _send(exchange, _rendered(frame.id, frame.model, self._chat_ids(request), request))

    def _render_completion(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, CompletionRequest)
        check_completion(request)
        self._adapter(request.model)
        frame = self._frame(exchange, request, CompletionFormat.id_prefix)
        prompts = self._completion_ids(request)
        _send(
            exchange,
            [
                _rendered(f"{frame.id}-{place}", frame.model, ids, request)
                for place, ids in enumerate(prompts)
            ],
        )

    def _tokenize(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, TokenizeRequest)
        self._adapter(request.model)
        ids = self._tokenizer.encode(self._text_to_tokenize(request))
        body: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._served.max_model_len_tokens,
            "tokens": ids,
            "token_strs": None,
        }
        if request.return_token_strs:
            body["token_strs"] = [self._tokenizer.decode([token]) for token in ids]
        _send(exchange, body)

    def _text_to_tokenize(self, request: TokenizeRequest) -> str:
        if request.messages is not None:
            return self._tokenizer.render(
                plain_messages(request.messages),
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                arguments=request.chat_template_kwargs,
            )
        if request.prompt is None:
            raise RequestRefused("prompt or messages must be given", kind="Bad Request")
        return request.prompt

    def _detokenize(self, exchange: Exchange) -> None:
        request = parse(exchange.request.body, DetokenizeRequest)
        self._adapter(request.model)
        _send(exchange, {"prompt": self._tokenizer.decode(self._checked(request.tokens))})

    # State

    def _models(self, exchange: Exchange) -> None:
        model = self._served.model
        cards = [self._card(model, None)]
        cards += [self._card(name, model) for name in self._served.adapters]
        _send(exchange, {"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> dict[str, Any]:
        length = self._served.max_model_len_tokens if parent is None else None
        return {
            "id": name,
            "object": "model",
            "created": self._served.started_s,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": length,
            "permission": [],
        }

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, exposition(self._collector), _PLAIN)

    def _kv_event_sources(self, exchange: Exchange) -> None:
        sources = {}
        for number, rank in enumerate(self._ranks):
            address = rank.publisher.address
            sources[str(number)] = {
                "endpoint": _any_host(address.endpoint),
                "replay_endpoint": _any_host(address.replay_endpoint),
                "topic": address.topic,
                "buffer_steps": address.buffer_steps,
            }
        _send(exchange, sources)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        for rank in self._ranks:
            rank.reset_prefix_cache()
        _empty(exchange)


def _check_content_type(exchange: Exchange) -> None:
    given = exchange.request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(
            "Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )


def _any_host(endpoint: str) -> str:
    # vLLM reports the address it was configured with, and that is a wildcard wherever it
    # binds: clients put the replica's host in its place.
    return f"tcp://*:{endpoint.rpartition(':')[2]}"


def _rendered(
    request_id: str, model: str, ids: list[int], request: GenerationFields
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "token_ids": ids,
        "features": None,
        "sampling_params": {"n": request.n or 1, "max_tokens": request.limit()},
        "model": model,
        "stream": bool(request.stream),
        "stream_options": None,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "kv_transfer_params": None,
        "token_offsets": None,
    }


def _send(exchange: Exchange, body: object) -> None:
    exchange.respond(200, orjson.dumps(body))


def _empty(exchange: Exchange) -> None:
    exchange.respond(200, b"")


def _refuse(exchange: Exchange, refusal: RequestRefused) -> None:
    error = {
        "message": str(refusal),
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.status,
    }
    exchange.respond(refusal.status, orjson.dumps({"error": error}))
