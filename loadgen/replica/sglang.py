"""What a gateway sees of SGLang where it differs from vLLM: its routes and its description."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
import orjson

from loadgen.replica.answering import Answer, StreamedAnswer, WholeAnswer, respond_json
from loadgen.replica.answers import JSON, Usage
from loadgen.replica.dispatch import Dispatcher, Work
from loadgen.replica.errors import RequestRefused
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.model import EngineModel, FirstToken
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import GenerationFields, completion_prompts, read_json
from loadgen.replica.routes import listed_source, send_nothing
from loadgen.replica.routing import Route

_VERSION = "0.5.23"
_DEFAULT_NEW_TOKENS = 128


class SamplingParams(msgspec.Struct, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = _DEFAULT_NEW_TOKENS
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    temperature: float | None = None
    n: int = 1


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /generate, with text or with token ids."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stream: bool = False
    rid: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_path: str | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None

    def fields(self) -> GenerationFields:
        """What the generator reads. Raises RequestRefused."""
        params = self.sampling_params
        if params.max_new_tokens is not None and params.max_new_tokens < 1:
            raise RequestRefused("max_new_tokens must be at least 1")
        return GenerationFields(
            max_tokens=params.max_new_tokens,
            min_tokens=params.min_new_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
            n=params.n,
        )

    @property
    def single(self) -> bool:
        """Whether the answer is one object and no list."""
        if self.text is not None:
            one = isinstance(self.text, str)
        else:
            one = not any(isinstance(each, list) for each in self.input_ids or ())
        return one and self.sampling_params.n == 1


class GenerateFormat:
    """Bodies of /generate; streams repeat the text from its beginning."""

    def __init__(self, rid: str, single: bool) -> None:
        self._rid = rid
        self._single = single
        self._began_s = time.monotonic()
        self.cached: dict[int, int] = {}

    def opening(self, sample: Sample) -> JSON | None:
        """There is no opening chunk."""
        return None

    def pieces(self, sample: Sample, start: int, end: int, last: bool) -> list[JSON]:
        """The text up to token `end`."""
        body = self._body(sample, end, last)
        return [body if self._single else {**body, "index": sample.index}]

    def progress(self, usage: Usage) -> JSON:
        """Never asked for: usage is in every chunk."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> JSON:
        """Never asked for: usage is in every chunk."""
        raise NotImplementedError

    def whole(self, samples: Sequence[Sample]) -> JSON | list[JSON]:
        """The answer to a request that does not stream."""
        bodies = [self._body(sample, len(sample.ids), True) for sample in samples]
        return bodies[0] if self._single else bodies

    def _body(self, sample: Sample, end: int, last: bool) -> JSON:
        return {
            "text": "".join(sample.pieces[:end]),
            "output_ids": sample.ids[:end],
            "meta_info": {
                "id": self._rid if self._single else f"{self._rid}_{sample.index}",
                "finish_reason": _finish_reason(sample) if last else None,
                "prompt_tokens": len(sample.prompt_ids),
                "weight_version": "default",
                "completion_tokens": end,
                "cached_tokens": self.cached.get(sample.index, 0),
                "e2e_latency": time.monotonic() - self._began_s,
            },
        }


def _finish_reason(sample: Sample) -> JSON:
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(sample.ids)}
    if sample.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted"}
    matched = sample.ids[-1] if sample.stop_reason is None else sample.stop_reason
    return {"type": "stop", "matched": matched}


class _StreamedGenerate(StreamedAnswer):
    """Tells the format how much of each prompt was cached."""

    def __init__(self, exchange: Exchange, form: GenerateFormat, samples: Sequence[Sample]) -> None:
        super().__init__(exchange, form, samples)
        self._cached = form.cached

    def tokens(
        self, sample: Sample, start: int, end: int, first: FirstToken | None, finished: bool
    ) -> None:
        if first is not None:
            self._cached[sample.index] = first.cached_tokens
        super().tokens(sample, start, end, first, finished)


class _WholeGenerate(WholeAnswer):
    def __init__(self, exchange: Exchange, form: GenerateFormat, samples: Sequence[Sample]) -> None:
        super().__init__(samples, lambda done, usage: respond_json(exchange, form.whole(done)))
        self._cached = form.cached

    def tokens(
        self, sample: Sample, start: int, end: int, first: FirstToken | None, finished: bool
    ) -> None:
        if first is not None:
            self._cached[sample.index] = first.cached_tokens
        super().tokens(sample, start, end, first, finished)


class SglangRoutes:
    """Native routes of SGLang."""

    def __init__(
        self,
        reader: PromptReader,
        generator: Generator,
        dispatcher: Dispatcher,
        model: EngineModel,
    ) -> None:
        self._reader = reader
        self._generator = generator
        self._dispatcher = dispatcher
        self._model = model

    def routes(self) -> list[Route]:
        """What this part answers."""
        infos = ("/get_server_info", "/server_info")
        models = ("/get_model_info", "/model_info")
        return [
            Route("POST", "/generate", self._generate),
            Route("GET", "/health_generate", self._health_generate),
            *(Route("GET", path, self._server_info) for path in infos),
            *(Route("GET", path, self._model_info) for path in models),
            Route("POST", "/flush_cache", self._flush_cache),
            Route("GET", "/flush_cache", self._flush_cache),
        ]

    def _generate(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, GenerateRequest)
        adapter = self._reader.adapter(request.lora_path)
        samples = self._generator.samples(self._prompts(request), request.fields())
        form = GenerateFormat(request.rid or uuid4().hex, request.single)
        answer: Answer
        if request.stream:
            answer = _StreamedGenerate(exchange, form, samples)
        else:
            answer = _WholeGenerate(exchange, form, samples)
        salt, session = request.cache_salt or "", request.session_id or ""
        work = Work(adapter, salt, request.priority or 0, session)
        wanted = request.data_parallel_rank
        if wanted is None:
            wanted = request.routed_dp_rank
        headers = exchange.request.headers
        ranks = self._dispatcher
        rank = ranks.rank_for(headers) if wanted is None else ranks.rank(str(wanted))
        exchange.on_abandoned = ranks.submit(answer, work, rank)
        if isinstance(answer, StreamedAnswer):
            answer.begin()

    def _prompts(self, request: GenerateRequest) -> list[list[int]]:
        given = request.text if request.text is not None else request.input_ids
        if not given:
            raise RequestRefused("Either text or input_ids should be provided.")
        encode = self._reader.tokenizer.encode
        return [
            encode(prompt) if isinstance(prompt, str) else self._reader.checked(prompt)
            for prompt in completion_prompts(given)
        ]

    def _health_generate(self, exchange: Exchange) -> None:
        """As SGLang's: 200 once a request of one token has gone through the engine."""
        sample = Sample(0, [0], [0], [""], "length")
        answer = WholeAnswer([sample], lambda samples, usage: send_nothing(exchange))
        self._dispatcher.launch(exchange, answer, Work())

    def _flush_cache(self, exchange: Exchange) -> None:
        for rank in self._dispatcher.ranks:
            rank.reset_prefix_cache()
        exchange.respond(200, b"Cache flushed.\n", "text/plain; charset=utf-8")

    def _server_info(self, exchange: Exchange) -> None:
        served = self._reader.served
        model = self._model
        respond_json(
            exchange,
            {
                "model_path": served.model,
                "tokenizer_path": served.model,
                "served_model_name": served.model,
                "context_length": served.max_model_len_tokens,
                "page_size": model.block_size_tokens,
                "dp_size": len(self._dispatcher.ranks),
                "tp_size": 1,
                "max_running_requests": model.max_num_seqs,
                "chunked_prefill_size": model.max_batched_tokens,
                "schedule_policy": model.policy,
                "enable_metrics": True,
                "disable_radix_cache": not model.prefix_caching,
                "kv_events_config": self._kv_events_config(),
                "status": "ready",
                "max_total_num_tokens": model.capacity_tokens,
                "internal_states": [{} for _ in self._dispatcher.ranks],
                "version": self._dispatcher.setup.version or _VERSION,
            },
        )

    def _kv_events_config(self) -> str | None:
        """As given on SGLang's command line: rank 0's addresses, rank r's ports are r higher."""
        address = self._dispatcher.ranks[0].publisher.address
        if address is None:
            return None
        source = listed_source(address, self._dispatcher.setup.listed_host)
        return orjson.dumps({"publisher": "zmq", **source}).decode()

    def _model_info(self, exchange: Exchange) -> None:
        model = self._reader.served.model
        info = {"model_path": model, "tokenizer_path": model, "is_generation": True}
        respond_json(exchange, {**info, "preferred_sampling_params": None})
