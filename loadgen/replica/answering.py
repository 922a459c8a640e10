"""Answers in flight: they take tokens from a rank and write them to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from loadgen.replica.answers import JSON, Usage
from loadgen.replica.generation import Sample
from loadgen.replica.http import Exchange
from loadgen.replica.model import FirstToken

EVENT_STREAM = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_AFTER_USAGE = ("system_fingerprint", "prompt_token_ids", "prompt_text")


class ChunkFormat(Protocol):
    """Bodies of an answer that streams as plain `data:` chunks."""

    def opening(self, sample: Sample) -> JSON | None:
        """The chunk before all content of a choice, if there is one."""

    def pieces(self, sample: Sample, start: int, end: int, last: bool) -> list[JSON]:
        """Tokens `start` to `end` of a choice, in one chunk or more."""

    def progress(self, usage: Usage) -> JSON:
        """The usage that each chunk carries if asked to."""

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
    cached tokens, as the prompt counts once. Of several prompts, vLLM's completions tell the
    cached tokens of one alone, and so does `one_prompt`: of the last one, or in a stream of the
    first that answers. `on_done` is called before the answer completes.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        per_prompt: int = 1,
        one_prompt: bool = False,
        details: bool = True,
    ) -> None:
        self.on_done: Callable[[], None] = _nothing
        self._samples = list(samples)
        self._per_prompt = per_prompt
        self._details = details
        self._left = len(samples)
        self._one_prompt = one_prompt
        self._cached_tokens: dict[int, int] = {}
        self._created_tokens = 0
        self._generated_tokens = 0

    def sinks(self) -> list[SampleSink]:
        """One receiver per sample."""
        return [SampleSink(self, place, each) for place, each in enumerate(self._samples)]

    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once however many samples it has."""
        prompts = {id(each.prompt_ids): len(each.prompt_ids) for each in self._samples}
        cached = self._cached_tokens
        if self._one_prompt and cached:
            cached = self._of_one_prompt(cached)
        return Usage(
            sum(prompts.values()),
            self._generated_tokens,
            sum(cached.values()),
            self._created_tokens,
            self._details,
        )

    def _of_one_prompt(self, cached_tokens: dict[int, int]) -> dict[int, int]:
        last = max(cached_tokens)
        return {last: cached_tokens[last]}

    def tokens(
        self, sample: Sample, start: int, end: int, first: FirstToken | None, finished: bool
    ) -> None:
        """Tokens `start` to `end` of a sample have come."""
        if first is not None and sample.index % self._per_prompt == 0:
            self._cached_tokens[sample.index] = first.cached_tokens
            self._created_tokens += first.created_tokens
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
        one_prompt: bool = False,
        details: bool = True,
    ) -> None:
        super().__init__(samples, per_prompt=per_prompt, one_prompt=one_prompt, details=details)
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
        super().__init__(samples, per_prompt=per_prompt, one_prompt=True, details=details)
        self._exchange = exchange
        self._form = form
        self._final_usage, self._every_usage = usage_wanted
        self._opened = False

    def _of_one_prompt(self, cached_tokens: dict[int, int]) -> dict[int, int]:
        first = next(iter(cached_tokens))
        return {first: cached_tokens[first]}

    def begin(self) -> None:
        """Send the response's head."""
        self._exchange.start_stream(EVENT_STREAM)

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        data = b""
        if not self._opened:
            self._opened = True
            # All choices are opened with the first token of any.
            opening = [self._form.opening(each) for each in self._samples]
            data = b"".join(self._event(body, sample, 0) for body in opening if body)
        for body in self._form.pieces(sample, start, end, finished):
            data += self._event(body, sample, end)
        self._exchange.send(data)

    def _event(self, body: JSON, sample: Sample, generated_tokens: int) -> bytes:
        if self._every_usage:
            usage = self._form.progress(Usage(len(sample.prompt_ids), generated_tokens, 0))
            # Before what only some chunks have.
            later = {name: body.pop(name) for name in _AFTER_USAGE if name in body}
            body = {**body, "usage": usage, **later}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _complete(self) -> None:
        data = _DONE
        if self._final_usage:
            data = b"data: " + orjson.dumps(self._form.closing(self.usage())) + b"\n\n" + _DONE
        self._exchange.send(data)
        self._exchange.end_stream()


class EventAnswer(Answer):
    """Typed server-sent events of one sample, without [DONE]."""

    def __init__(
        self, exchange: Exchange, form: EventFormat, sample: Sample, *, details: bool = True
    ) -> None:
        super().__init__([sample], details=details)
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
