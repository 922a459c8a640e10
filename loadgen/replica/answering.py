"""Answers in flight: they take tokens from a rank and write them to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from loadgen.replica.answers import JSON, Usage, total_usage
from loadgen.replica.generation import Sample
from loadgen.replica.http import Exchange
from loadgen.replica.model import FirstToken

EVENT_STREAM = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"


class ChunkFormat(Protocol):
    """Bodies of an answer that streams as plain `data:` chunks."""

    def opening(self, sample: Sample) -> JSON | None:
        """The chunk before all content of a choice, if there is one."""

    def piece(self, sample: Sample, start: int, end: int, last: bool) -> JSON:
        """Tokens `start` to `end` of a choice."""

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage of a stream."""


class EventFormat(Protocol):
    """Events of an answer that streams as typed events, each a (type, data) pair."""

    def begin(self) -> list[tuple[str, JSON]]:
        """Before any token."""

    def opening(self, usage: Usage) -> list[tuple[str, JSON]]:
        """With the first token."""

    def delta(self, text: str) -> list[tuple[str, JSON]]:
        """One more piece of text, never empty."""

    def closing(self, sample: Sample, usage: Usage) -> list[tuple[str, JSON]]:
        """After the last token."""


def event(kind: str, data: JSON) -> bytes:
    """One typed server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))


def respond_json(exchange: Exchange, body: Any) -> None:
    """Answer 200 with JSON."""
    exchange.respond(200, orjson.dumps(body))


class Answer:
    """One request's answer over all of its samples; subclasses tell how it is written.

    `per_prompt` is the number of samples of each prompt: only the first of them counts for
    cached tokens, as the prompt counts once. `on_done` is called before the answer completes.
    """

    def __init__(
        self, samples: Sequence[Sample], *, per_prompt: int = 1, details: bool = True
    ) -> None:
        self.on_done: Callable[[], None] = _nothing
        self._samples = list(samples)
        self._per_prompt = per_prompt
        self._details = details
        self._left = len(samples)
        self._cached_tokens = 0
        self._generated_tokens = 0

    def sinks(self) -> list[SampleSink]:
        """One receiver per sample."""
        return [SampleSink(self, place, each) for place, each in enumerate(self._samples)]

    def usage(self) -> Usage:
        """Tokens so far."""
        return total_usage(
            self._samples, self._cached_tokens, self._generated_tokens, details=self._details
        )

    def tokens(
        self, sample: Sample, start: int, end: int, first: FirstToken | None, finished: bool
    ) -> None:
        """Tokens `start` to `end` of a sample have come."""
        if first is not None and sample.index % self._per_prompt == 0:
            self._cached_tokens += first.cached_tokens
        self._generated_tokens += end - start
        self._write(sample, start, end, finished)
        if finished:
            self._left -= 1
            if not self._left:
                self.on_done()
                self._complete()

    def cut(self, place: int, sent: int) -> Sample:
        """The engine gave a sample up: it ends with "abort" after `sent` tokens."""
        whole = self._samples[place]
        sample = replace(
            whole,
            ids=whole.ids[:sent],
            pieces=whole.pieces[:sent],
            finish_reason="abort",
            stop_reason=None,
        )
        self._samples[place] = sample
        return sample

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        raise NotImplementedError

    def _complete(self) -> None:
        raise NotImplementedError


class WholeAnswer(Answer):
    """Everything at the end: `then` gets the samples and their usage."""

    def __init__(
        self,
        samples: Sequence[Sample],
        then: Callable[[Sequence[Sample], Usage], None],
        *,
        per_prompt: int = 1,
        details: bool = True,
    ) -> None:
        super().__init__(samples, per_prompt=per_prompt, details=details)
        self._then = then

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        pass

    def _complete(self) -> None:
        self._then(self._samples, self.usage())


class StreamedAnswer(Answer):
    """Server-sent events: opening, pieces, the last piece with its reason, usage, [DONE]."""

    def __init__(
        self,
        exchange: Exchange,
        form: ChunkFormat,
        samples: Sequence[Sample],
        *,
        per_prompt: int = 1,
        details: bool = True,
        usage_wanted: tuple[bool, bool] = (False, False),
    ) -> None:
        super().__init__(samples, per_prompt=per_prompt, details=details)
        self._exchange = exchange
        self._form = form
        self._final_usage, self._every_usage = usage_wanted

    def begin(self) -> None:
        """Send the response's head."""
        self._exchange.start_stream(EVENT_STREAM)

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        data = b""
        if not start:
            opening = self._form.opening(sample)
            data = b"" if opening is None else self._event(opening, 0)
        data += self._event(self._form.piece(sample, start, end, finished), end)
        self._exchange.send(data)

    def _event(self, body: JSON, generated_tokens: int) -> bytes:
        if self._every_usage:
            body = {**body, "usage": self.usage().json()}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _complete(self) -> None:
        data = _DONE
        if self._final_usage:
            data = b"data: " + orjson.dumps(self._form.closing(self.usage())) + b"\n\n" + _DONE
        self._exchange.send(data)
        self._exchange.end_stream()


class EventAnswer(Answer):
    """Typed server-sent events of one sample, without [DONE]."""

    def __init__(self, exchange: Exchange, form: EventFormat, sample: Sample) -> None:
        super().__init__([sample])
        self._exchange = exchange
        self._form = form

    def begin(self) -> None:
        """Send the response's head and what does not wait for a token."""
        self._exchange.start_stream(EVENT_STREAM)
        self._send(self._form.begin())

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        events = [] if start else self._form.opening(self.usage())
        text = "".join(sample.pieces[start:end])
        if text:
            events += self._form.delta(text)
        self._send(events)

    def _complete(self) -> None:
        self._send(self._form.closing(self._samples[0], self.usage()))
        self._exchange.end_stream()

    def _send(self, events: Sequence[tuple[str, JSON]]) -> None:
        if events:
            self._exchange.send(b"".join(event(kind, data) for kind, data in events))


class SampleSink:
    """Counts one sample's tokens and passes them to its answer."""

    __slots__ = ("_answer", "_place", "_sent", "sample")

    def __init__(self, answer: Answer, place: int, sample: Sample) -> None:
        self.sample = sample
        self._answer = answer
        self._place = place
        self._sent = 0

    def tokens(self, count: int, first: FirstToken | None, finished: bool) -> None:
        """`count` more tokens of the sample."""
        start = self._sent
        self._sent = end = start + count
        self._answer.tokens(self.sample, start, end, first, finished)

    def abort(self) -> None:
        """No more tokens come: the engine gave the request up."""
        self.sample = self._answer.cut(self._place, self._sent)
        self._answer.tokens(self.sample, self._sent, self._sent, None, True)

    def reason(self) -> str:
        """Why the sample ends."""
        return self.sample.finish_reason


def _nothing() -> None:
    return None
