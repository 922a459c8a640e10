"""/v1/responses: creating, continuing, fetching and cancelling, out of one replica's memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.replica.answering import EventAnswer, WholeAnswer, respond_json
from loadgen.replica.answers import JSON, Usage
from loadgen.replica.dispatch import Dispatcher
from loadgen.replica.errors import InvalidValue, RequestRefused
from loadgen.replica.generating import work
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import ChatRequest, check_chat, read_json
from loadgen.replica.responses import ResponseFormat, ResponsesRequest, input_messages
from loadgen.replica.routing import Route

_REMEMBERED = 1000
_KIND = "invalid_request_error"
_UNFINISHED = ("queued", "in_progress")


@dataclass(slots=True)
class Kept:
    """A response that is remembered, and what was said up to it without its instructions."""

    body: JSON
    said: list[JSON]
    stop: Callable[[], None] | None = None

    def conversation(self) -> list[JSON]:
        """Messages that precede a continuation."""
        texts = [part["text"] for item in self.body["output"] for part in item["content"]]
        return [*self.said, *({"role": "assistant", "content": text} for text in texts)]


class ResponseMemory:
    """The last `limit` responses; the oldest are forgotten first, and stopped if they run."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def add(self, kept: Kept) -> None:
        """Remember a response by its id."""
        self._kept[kept.body["id"]] = kept
        if len(self._kept) > self._limit:
            _, oldest = self._kept.popitem(last=False)
            if oldest.stop is not None:
                oldest.stop()

    def find(self, response_id: str) -> Kept:
        """Raises RequestRefused (404)."""
        kept = self._kept.get(response_id)
        if kept is None:
            message = f"Response with id '{response_id}' not found."
            raise RequestRefused(message, status=404, kind=_KIND, param="response_id")
        return kept


class ResponseRoutes:
    """Responses of one replica; those that were to be stored can be continued."""

    def __init__(self, reader: PromptReader, generator: Generator, dispatcher: Dispatcher) -> None:
        self._reader = reader
        self._generator = generator
        self._dispatcher = dispatcher
        self._memory = ResponseMemory()

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/responses", self._create),
            Route("GET", "/v1/responses/{}", self._retrieve),
            Route("POST", "/v1/responses/{}/cancel", self._cancel),
        ]

    def _create(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, ResponsesRequest)
        if request.background and not request.store:
            raise InvalidValue("background can only be used when `store` is true", "background")
        history = self._history(request.previous_response_id)
        chat = request.chat(history)
        check_chat(chat)
        adapter = self._reader.adapter(chat.model)
        prompt = self._reader.chat_ids(chat)
        (sample,) = self._generator.samples([prompt], chat)
        form = self._format(request, len(prompt))
        keep = self._keeper(request, [*history, *input_messages(request.input)])
        if request.background and not request.stream:
            self._in_background(exchange, chat, adapter, sample, form, keep)
        elif request.stream:
            answer = EventAnswer(exchange, _KeptFormat(form, keep), sample)
            self._dispatcher.launch(exchange, answer, work(chat, adapter))
            answer.begin()
        else:

            def whole(samples: Sequence[Sample], usage: Usage) -> None:
                body = form.finished(samples[0], usage)
                keep(body)
                respond_json(exchange, body)

            self._dispatcher.launch(exchange, WholeAnswer([sample], whole), work(chat, adapter))

    def _format(self, request: ResponsesRequest, prompt_tokens: int) -> ResponseFormat:
        served = self._reader.served
        limit = request.max_output_tokens or served.max_model_len_tokens - prompt_tokens
        return ResponseFormat(request, request.model or served.model, int(time.time()), limit)

    def _keeper(self, request: ResponsesRequest, said: list[JSON]) -> Callable[[JSON], Kept]:
        def keep(body: JSON) -> Kept:
            kept = Kept(body, said)
            if request.store:
                self._memory.add(kept)
            return kept

        return keep

    def _in_background(
        self,
        exchange: Exchange,
        chat: ChatRequest,
        adapter: str,
        sample: Sample,
        form: ResponseFormat,
        keep: Callable[[JSON], Kept],
    ) -> None:
        def finished(samples: Sequence[Sample], usage: Usage) -> None:
            kept.body, kept.stop = form.finished(samples[0], usage), None

        rank = self._dispatcher.rank_for(exchange.request.headers)
        stop = self._dispatcher.submit(WholeAnswer([sample], finished), work(chat, adapter), rank)
        kept = keep(form.state("queued"))
        kept.stop = stop
        respond_json(exchange, kept.body)

    def _history(self, previous: str | None) -> list[JSON]:
        return [] if previous is None else self._memory.find(previous).conversation()

    def _retrieve(self, exchange: Exchange, response_id: str) -> None:
        respond_json(exchange, self._memory.find(response_id).body)

    def _cancel(self, exchange: Exchange, response_id: str) -> None:
        kept = self._memory.find(response_id)
        if kept.body["status"] not in _UNFINISHED:
            message = "Cannot cancel a synchronous response."
            raise RequestRefused(message, kind=_KIND, param="response_id")
        if kept.stop is not None:
            kept.stop()
        kept.body, kept.stop = {**kept.body, "status": "cancelled"}, None
        respond_json(exchange, kept.body)


class _KeptFormat:
    """Events of a response that is remembered once it has ended."""

    def __init__(self, form: ResponseFormat, keep: Callable[[JSON], Kept]) -> None:
        self.begin = form.begin
        self.opening = form.opening
        self.delta = form.delta
        self._form = form
        self._keep = keep

    def closing(self, sample: Sample, usage: Usage) -> list[tuple[str, JSON]]:
        """After the last token."""
        events = self._form.closing(sample, usage)
        self._keep(events[-1][1]["response"])
        return events
