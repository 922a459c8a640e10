"""The HTTP surface of one replica: routing, and the way from a request to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import orjson

from loadgen.replica.answering import Answer, StreamedAnswer, WholeAnswer
from loadgen.replica.answers import ChatFormat, CompletionFormat, Format
from loadgen.replica.errors import EngineError, RequestRefused, TokenizerError
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.metrics import ReplicaCollector
from loadgen.replica.model import EngineModel, EngineRequest
from loadgen.replica.prompts import PromptReader, Served
from loadgen.replica.rank import RankRunner
from loadgen.replica.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    check_chat,
    check_completion,
    parse,
)
from loadgen.replica.routes import Routes, StateRoutes, TokenRoutes

_RANK_HEADER = "x-data-parallel-rank"
# How vLLM weighs waiting against running requests when it chooses a rank itself.
_WAITING_WEIGHT = 4


class ReplicaAPI:
    """Routes of one replica over its ranks; `handle` is the HTTP server's handler."""

    def __init__(
        self,
        served: Served,
        generator: Generator,
        model: EngineModel,
        ranks: Sequence[RankRunner],
    ) -> None:
        self._generator = generator
        self._tokenizer = generator.tokenizer
        self._reader = PromptReader(served, generator.tokenizer)
        self._ranks = ranks
        self._numbers = count()
        self._in_flight = 0
        collector = ReplicaCollector(served.model, model, ranks)
        state = StateRoutes(self._reader, ranks, collector, lambda: self._in_flight)
        self._routes: Routes = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            **TokenRoutes(self._reader).routes(),
            **state.routes(),
        }

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""
        try:
            self._route(exchange)
        except RequestRefused as refusal:
            _refuse(exchange, refusal)
        except (TokenizerError, EngineError) as error:
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
        if request.method != method:
            raise RequestRefused("Method Not Allowed", status=405, kind="Method Not Allowed")
        handler(exchange)

    def _chat(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        request = parse(exchange.request.body, ChatRequest)
        check_chat(request)
        adapter = self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, ChatFormat.id_prefix)
        prompt = self._reader.chat_ids(request)
        form = ChatFormat(request, frame, self._tokenizer)
        self._generate(exchange, request, form, [prompt], adapter)

    def _completion(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        request = parse(exchange.request.body, CompletionRequest)
        check_completion(request)
        adapter = self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, CompletionFormat.id_prefix)
        prompts = self._reader.completion_ids(request)
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

        self._in_flight += 1
        exchange.on_abandoned = abort
        try:
            for sink in answer.sinks():
                ids.append(str(next(self._numbers)))
                rank.submit(_engine_request(ids[-1], sink.sample, request, adapter), sink)
        except EngineError:
            exchange.on_abandoned = None
            abort()
            raise

    def _left_flight(self) -> None:
        self._in_flight -= 1

    def _choose_rank(self, exchange: Exchange) -> RankRunner:
        wanted = exchange.request.headers.get(_RANK_HEADER, "").strip()
        if not wanted.removeprefix("-").isdecimal():
            return min(self._ranks, key=lambda r: r.waiting * _WAITING_WEIGHT + r.running)
        rank = int(wanted)
        if not 0 <= rank < len(self._ranks):
            bounds = f"[0, {len(self._ranks)})"
            raise RequestRefused(f"data_parallel_rank {rank} is out of range {bounds}")
        return self._ranks[rank]


def _engine_request(
    request_id: str, sample: Sample, request: GenerationFields, adapter: str
) -> EngineRequest:
    return EngineRequest(
        id=request_id,
        prompt_ids=sample.prompt_ids,
        max_tokens=len(sample.ids),
        salt=request.cache_salt or "",
        adapter=adapter,
        priority=request.priority,
        reply_ids=sample.ids,
        session_id=request.session_id or "",
    )


def _check_content_type(exchange: Exchange) -> None:
    given = exchange.request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(
            "Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )


def _refuse(exchange: Exchange, refusal: RequestRefused) -> None:
    error = {
        "message": str(refusal),
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.status,
    }
    exchange.respond(refusal.status, orjson.dumps({"error": error}))
