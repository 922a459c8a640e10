"""The HTTP surface of one replica: which routes it has, and errors in the shape of each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import orjson

from loadgen.replica.audio import AudioRoutes
from loadgen.replica.batches import BatchRoutes
from loadgen.replica.dispatch import Dispatcher
from loadgen.replica.errors import (
    EngineError,
    InvalidBody,
    NoRoute,
    RequestRefused,
    TokenizerError,
)
from loadgen.replica.faults import FaultPlan, Faults
from loadgen.replica.generating import GenerationRoutes
from loadgen.replica.generation import Generator
from loadgen.replica.http import Exchange, HTTPRequest
from loadgen.replica.messages import MessageRoutes
from loadgen.replica.metrics import Collector, ReplicaCollector
from loadgen.replica.model import EngineModel
from loadgen.replica.objects import FileRoutes, FileStore
from loadgen.replica.pooling import PoolingRoutes
from loadgen.replica.prompts import PromptReader, Served
from loadgen.replica.rank import RankRunner
from loadgen.replica.response_routes import ResponseRoutes
from loadgen.replica.routes import StateRoutes, TokenRoutes
from loadgen.replica.routing import Route, Router
from loadgen.replica.setup import Setup
from loadgen.replica.sglang import SglangRoutes
from loadgen.replica.sglang_metrics import SglangCollector
from loadgen.replica.sleep import ServerInfoRoutes, SleepRoutes

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM's --api-key guards; /health, /metrics, /tokenize and the like are open to all."""
_OPEN = ("/health", "/metrics", "/sim/")
"""What SGLang's leaves open, and what is not SGLang's."""
_ONLY_VLLM = (
    "/v1/chat/completions/render", "/v1/completions/render", "/kv_event_sources",
    "/reset_prefix_cache", "/load", "/ping", "/version", "/pooling", "/score", "/rerank",
    "/v2/rerank",
)  # fmt: skip


class Flavor(StrEnum):
    """Whose names, metrics and events a replica has."""

    VLLM = "vllm"
    SGLANG = "sglang"


class ReplicaAPI:
    """Routes of one replica over its ranks; `handle` is the HTTP server's handler."""

    def __init__(
        self,
        served: Served,
        generator: Generator,
        model: EngineModel,
        ranks: Sequence[RankRunner],
        *,
        flavor: Flavor = Flavor.VLLM,
        dev_mode: bool = True,
        faults: FaultPlan | None = None,
        setup: Setup = Setup(),
    ) -> None:
        self._served = served
        self._model = model
        self._generator = generator
        self._reader = PromptReader(served, generator.tokenizer)
        self._dispatcher = Dispatcher(ranks, setup)
        self._faults = Faults(faults or FaultPlan(), self._answer)
        sleeping = SleepRoutes(ranks)
        routes = [*self._models(), *self._faults.routes(), *sleeping.routes("/sim")]
        if flavor is Flavor.SGLANG:
            routes = [route for route in routes if route.path not in _ONLY_VLLM]
            routes += self._state(SglangCollector(served.model, model, ranks), without=_ONLY_VLLM)
            routes += SglangRoutes(self._reader, generator, self._dispatcher, model).routes()
        else:
            routes += self._state(ReplicaCollector(served.model, model, ranks))
            routes += self._objects()
            if dev_mode:
                routes += sleeping.routes()
                routes += ServerInfoRoutes(served, model, len(ranks), setup).routes()
        self._router = Router(routes)
        self._keys = {f"bearer {key}" for key in setup.api_keys}
        self._flavor = flavor

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later, well or as the faults have it."""
        request = exchange.request
        if self._keys and self._guards(request.path) and not self._allows(request):
            exchange.respond(401, b'{"error":"Unauthorized"}')
        else:
            self._faults.handle(exchange)

    def _guards(self, path: str) -> bool:
        if self._flavor is Flavor.SGLANG:
            return not path.startswith(_OPEN)
        return path.startswith(_GUARDED)

    def _allows(self, request: HTTPRequest) -> bool:
        """Whether it carries one of the keys; OPTIONS need none, as in vLLM."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return request.method == "OPTIONS" or f"{scheme.lower()} {key}" in self._keys

    def _answer(self, exchange: Exchange) -> None:
        try:
            self._router.route(exchange)
        except RequestRefused as refusal:
            _refuse(exchange, refusal)
        except (TokenizerError, EngineError) as error:
            _refuse(exchange, RequestRefused(str(error)))
        except Exception as error:
            _refuse(exchange, RequestRefused(str(error), status=500, kind="InternalServerError"))
            raise

    def _models(self) -> list[Route]:
        """What a model answers."""
        parts = (self._reader, self._generator, self._dispatcher)
        return [
            *GenerationRoutes(*parts).routes(),
            *ResponseRoutes(*parts).routes(),
            *MessageRoutes(*parts).routes(),
            *AudioRoutes(*parts).routes(),
            *PoolingRoutes(self._reader, self._dispatcher).routes(),
            *TokenRoutes(self._reader).routes(),
        ]

    def _objects(self) -> list[Route]:
        files = FileStore()
        return [*FileRoutes(files).routes(), *BatchRoutes(files, self._answer).routes()]

    def _state(self, collector: Collector, without: Sequence[str] = ()) -> list[Route]:
        dispatcher = self._dispatcher
        state = StateRoutes(
            self._reader,
            dispatcher.ranks,
            collector,
            lambda: dispatcher.in_flight,
            dispatcher.setup,
        )
        return [route for route in state.routes() if route.path not in without]


def _refuse(exchange: Exchange, refusal: RequestRefused) -> None:
    message = str(refusal)
    body: dict[str, Any]
    headers = {}
    if isinstance(refusal, NoRoute):
        body = {"detail": message}
        headers = {"allow": refusal.methods} if refusal.methods else {}
    elif exchange.request.path.startswith("/v1/messages") and not isinstance(refusal, InvalidBody):
        body = {"type": "error", "error": {"type": refusal.kind, "message": message}}
    else:
        error = {
            "message": message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.status,
        }
        body = {"error": error}
    exchange.respond(refusal.status, orjson.dumps(body), headers=headers)
