"""Endpoints of pooling models: embeddings, rerank, score, pooling, classify.

Their prompts go through the engine as prompts of one token to generate: they wait, take the
time of a prefill and use its block cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from loadgen.replica.answering import WholeAnswer, respond_json
from loadgen.replica.answers import JSON, Usage
from loadgen.replica.dispatch import Dispatcher, Work
from loadgen.replica.errors import RequestRefused
from loadgen.replica.generation import Sample
from loadgen.replica.http import Exchange
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import ChatRequest, check_chat, completion_prompts, read_json
from loadgen.replica.routing import Route
from loadgen.replica.scoring import (
    DEFAULT_DIMENSIONS,
    LABELS,
    MAX_DIMENSIONS,
    as_base64,
    embedding,
    label_probabilities,
    score,
)

_MAX_INPUTS = 2048
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=MAX_DIMENSIONS)]
Texts = str | list[str]


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all of these requests have in common."""

    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class EmbeddingRequest(PoolingFields, kw_only=True):
    """POST /v1/embeddings, /pooling and /classify: text, token ids, a list of either, a chat."""

    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Texts
    top_n: int = 0


class ScoreRequest(PoolingFields, kw_only=True):
    """POST /score and /v1/score; each side has several names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Both sides, equally long: a single text on the left goes with every right one."""
        left = _first_given(self.text_1, self.data_1, self.queries)
        right = _first_given(self.text_2, self.data_2, self.documents, self.items)
        if not left or not right:
            raise RequestRefused("both sides of a score need a text", param="text_1")
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise RequestRefused("Input lengths must be either 1:1, 1:N or N:N", param="text_1")
        return left, right


def _first_given(*sides: Texts | None) -> list[str]:
    given = next((side for side in sides if side is not None), [])
    return [given] if isinstance(given, str) else given


class PoolingRoutes:
    """Well-formed answers to everything a pooling model serves."""

    def __init__(self, reader: PromptReader, dispatcher: Dispatcher) -> None:
        self._reader = reader
        self._dispatcher = dispatcher

    def routes(self) -> list[Route]:
        """What this part answers."""
        reranks = ("/rerank", "/v1/rerank", "/v2/rerank")
        return [
            Route("POST", "/v1/embeddings", self._embed),
            Route("POST", "/pooling", self._pool),
            Route("POST", "/classify", self._classify),
            *(Route("POST", path, self._rerank) for path in reranks),
            *(Route("POST", path, self._score) for path in ("/score", "/v1/score")),
        ]

    def _embed(self, exchange: Exchange) -> None:
        self._vectors(exchange, "embd-", "embedding", "embedding")

    def _pool(self, exchange: Exchange) -> None:
        self._vectors(exchange, "pool-", "pooling", "data")

    def _vectors(self, exchange: Exchange, prefix: str, kind: str, field: str) -> None:
        request = read_json(exchange.request, EmbeddingRequest)
        prompts = self._inputs(request)

        def item(place: int) -> JSON:
            values = embedding(prompts[place], request.dimensions or DEFAULT_DIMENSIONS)
            coded = as_base64(values) if request.encoding_format == "base64" else values
            return {"index": place, "object": kind, field: coded}

        self._listed(exchange, request, prompts, prefix, item)

    def _classify(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, EmbeddingRequest)
        prompts = self._inputs(request)

        def item(place: int) -> JSON:
            chances = label_probabilities(prompts[place])
            label = LABELS[chances.index(max(chances))]
            return {"index": place, "label": label, "probs": chances, "num_classes": len(LABELS)}

        self._listed(exchange, request, prompts, "classify-", item)

    def _score(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, ScoreRequest)
        encode = self._reader.tokenizer.encode
        pairs = [(encode(a), encode(b)) for a, b in zip(*request.sides(), strict=True)]

        def item(place: int) -> JSON:
            return {"index": place, "object": "score", "score": score(*pairs[place])}

        self._listed(exchange, request, [a + b for a, b in pairs], "score-", item)

    def _rerank(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, RerankRequest)
        given = request.documents
        documents = [given] if isinstance(given, str) else given
        encode = self._reader.tokenizer.encode
        query = encode(request.query)
        scores = [score(query, encode(text)) for text in documents]
        order = sorted(range(len(documents)), key=lambda place: -scores[place])

        def finish(usage: Usage) -> None:
            tokens = usage.prompt_tokens
            body = {
                "id": f"rerank-{uuid4().hex}",
                "model": request.model or self._reader.served.model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": [
                    {
                        "index": place,
                        "document": {"text": documents[place], "multi_modal": None},
                        "relevance_score": scores[place],
                    }
                    for place in order[: request.top_n or None]
                ],
            }
            respond_json(exchange, body)

        self._run(exchange, request, [query + encode(text) for text in documents], finish)

    def _listed(
        self,
        exchange: Exchange,
        request: PoolingFields,
        prompts: list[list[int]],
        prefix: str,
        item: Callable[[int], JSON],
    ) -> None:
        def finish(usage: Usage) -> None:
            tokens = usage.prompt_tokens
            body = {
                "id": f"{prefix}{uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": request.model or self._reader.served.model,
                "data": [item(place) for place in range(len(prompts))],
                "usage": {
                    "prompt_tokens": tokens,
                    "total_tokens": tokens,
                    "completion_tokens": 0,
                    "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                },
            }
            respond_json(exchange, body)

        self._run(exchange, request, prompts, finish)

    def _run(
        self,
        exchange: Exchange,
        request: PoolingFields,
        prompts: Sequence[list[int]],
        finish: Callable[[Usage], None],
    ) -> None:
        """Have the engine prefill the prompts, then call `finish`."""
        adapter = self._reader.adapter(request.model)
        samples = [self._sample(place, ids) for place, ids in enumerate(prompts)]
        if not 1 <= len(samples) <= _MAX_INPUTS:
            raise RequestRefused(f"give 1 to {_MAX_INPUTS} inputs", param="input")

        def whole(samples: Sequence[Sample], usage: Usage) -> None:
            finish(usage)

        salt = request.cache_salt or ""
        self._dispatcher.launch(
            exchange, WholeAnswer(samples, whole), Work(adapter, salt, request.priority)
        )

    def _sample(self, place: int, prompt_ids: list[int]) -> Sample:
        limit = self._reader.served.max_model_len_tokens
        if not prompt_ids:
            raise RequestRefused("The decoder prompt cannot be empty", param="input")
        if len(prompt_ids) >= limit:
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, your request "
                f"has {len(prompt_ids)} input tokens.",
                param="input",
            )
        # The one token the engine has to generate, and nobody sees.
        return Sample(place, prompt_ids, [0], [""], "stop")

    def _inputs(self, request: EmbeddingRequest) -> list[list[int]]:
        if request.messages is not None:
            chat = ChatRequest(messages=request.messages, add_generation_prompt=False)
            check_chat(chat)
            return [self._reader.chat_ids(chat)]
        if request.input is None:
            raise RequestRefused("input or messages must be given", param="input")
        encode = self._reader.tokenizer.encode
        return [
            encode(prompt) if isinstance(prompt, str) else self._reader.checked(prompt)
            for prompt in completion_prompts(request.input)
        ]
