"""Answers in flight: they take tokens from a rank and write them to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from loadgen.replica.answers import JSON, Format, total_usage
from loadgen.replica.generation import Sample
from loadgen.replica.http import Exchange
from loadgen.replica.model import FirstToken

_DONE = b"data: [DONE]\n\n"


class Answer:
    """One request's answer over all of its samples; `streams` tells how it is written.

    `per_prompt` is the number of samples of each prompt: only the first of them counts for
    cached tokens, as the prompt counts once.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: Format,
        samples: Sequence[Sample],
        *,
        per_prompt: int,
        usage_wanted: tuple[bool, bool],
        on_done: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._samples = samples
        self._per_prompt = per_prompt
        self._final_usage, self._every_usage = usage_wanted
        self._on_done = on_done
        self._left = len(samples)
        self._cached_tokens = 0
        self._generated_tokens = 0

    def sinks(self) -> list[SampleSink]:
        """One receiver per sample."""
        return [SampleSink(self, sample) for sample in self._samples]

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
                self._on_done()
                self._complete()

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        raise NotImplementedError

    def _complete(self) -> None:
        raise NotImplementedError


class WholeAnswer(Answer):
    """Everything in one JSON body at the end."""

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        pass

    def _complete(self) -> None:
        usage = total_usage(self._samples, self._cached_tokens, self._generated_tokens)
        self._exchange.respond(200, orjson.dumps(self._form.whole(self._samples, usage)))


class StreamedAnswer(Answer):
    """Server-sent events: opening, pieces, the last piece with its reason, usage, [DONE]."""

    def begin(self) -> None:
        """Send the response's head."""
        self._exchange.start_stream("text/event-stream; charset=utf-8")

    def _write(self, sample: Sample, start: int, end: int, finished: bool) -> None:
        data = b""
        if not start:
            opening = self._form.opening(sample)
            data = b"" if opening is None else self._event(opening, 0)
        data += self._event(self._form.piece(sample, start, end, finished), end)
        self._exchange.send(data)

    def _event(self, body: JSON, generated_tokens: int) -> bytes:
        if self._every_usage:
            usage = total_usage(self._samples, self._cached_tokens, self._generated_tokens)
            body = {**body, "usage": usage.json()}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _complete(self) -> None:
        data = _DONE
        if self._final_usage:
            usage = total_usage(self._samples, self._cached_tokens, self._generated_tokens)
            data = b"data: " + orjson.dumps(self._form.closing(usage)) + b"\n\n" + _DONE
        self._exchange.send(data)
        self._exchange.end_stream()


class SampleSink:
    """Counts one sample's tokens and passes them to its answer."""

    __slots__ = ("_answer", "_sample", "_sent")

    def __init__(self, answer: Answer, sample: Sample) -> None:
        self._answer = answer
        self._sample = sample
        self._sent = 0

    @property
    def sample(self) -> Sample:
        """The sample whose tokens come here."""
        return self._sample

    def tokens(self, count: int, first: FirstToken | None, finished: bool) -> None:
        """`count` more tokens of the sample."""
        start = self._sent
        self._sent = end = start + count
        self._answer.tokens(self._sample, start, end, first, finished)

    def reason(self) -> str:
        """Why the sample ends."""
        return self._sample.finish_reason
