"""POST /v1/chat/completions and /v1/completions: from their bodies to answers in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadgen.replica.answering import Answer, StreamedAnswer, WholeAnswer, respond_json
from loadgen.replica.answers import ChatFormat, CompletionFormat, Usage
from loadgen.replica.dispatch import Dispatcher, Work
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    check_chat,
    check_completion,
    read_json,
)
from loadgen.replica.routing import Route
from loadgen.replica.tools import forced_text


class GenerationRoutes:
    """The two endpoints that answer with choices."""

    def __init__(self, reader: PromptReader, generator: Generator, dispatcher: Dispatcher) -> None:
        self._reader = reader
        self._generator = generator
        self._dispatcher = dispatcher

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/chat/completions", self._chat),
            Route("POST", "/v1/completions", self._completion),
        ]

    def _chat(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, ChatRequest)
        check_chat(request)
        adapter = self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, ChatFormat.id_prefix)
        prompt = self._reader.chat_ids(request)
        form = ChatFormat(request, frame, self._generator.tokenizer)
        samples = self._generator.samples([prompt], request, forced_text(request))
        if request.tool_choice == "required":
            samples = [_called(sample) for sample in samples]
        self._generate(exchange, request, form, samples, adapter)

    def _completion(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, CompletionRequest)
        check_completion(request, self._generator.tokenizer.size)
        adapter = self._reader.adapter(request.model)
        frame = self._reader.frame(exchange.request, request, CompletionFormat.id_prefix)
        prompts = self._reader.completion_ids(request)
        form = CompletionFormat(request, frame, self._generator.tokenizer)
        samples = self._generator.samples(prompts, request)
        self._generate(exchange, request, form, samples, adapter)

    def _generate(
        self,
        exchange: Exchange,
        request: GenerationFields,
        form: ChatFormat | CompletionFormat,
        samples: Sequence[Sample],
        adapter: str,
    ) -> None:
        per_prompt = request.n or 1
        details = self._dispatcher.setup.prompt_tokens_details

        def whole(samples: Sequence[Sample], usage: Usage) -> None:
            respond_json(exchange, form.whole(samples, usage))

        answer: Answer
        if request.stream:
            usage = request.usage_wanted()
            answer = StreamedAnswer(
                exchange,
                form,
                samples,
                per_prompt=per_prompt,
                details=details,
                usage_wanted=usage,
            )
        else:
            answer = WholeAnswer(
                samples, whole, per_prompt=per_prompt, one_prompt=True, details=details
            )
        self._dispatcher.launch(exchange, answer, work(request, adapter))
        if isinstance(answer, StreamedAnswer):
            answer.begin()


def _called(sample: Sample) -> Sample:
    """vLLM says "tool_calls" where a tool had to be called, "stop" where one was named."""
    ended = sample.finish_reason == "stop"
    return replace(sample, finish_reason="tool_calls") if ended else sample


def work(request: GenerationFields, adapter: str) -> Work:
    """What the engine is told of a generation request."""
    return Work(adapter, request.cache_salt or "", request.priority, request.session_id or "")
