"""Speech to text: forms in, deterministic text out, in vLLM's shapes."""

from __future__ import annotations

import time
from array import array
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from xxhash import xxh3_64_intdigest

from loadgen.replica.answering import Answer, StreamedAnswer, WholeAnswer, respond_json
from loadgen.replica.answers import JSON, Usage
from loadgen.replica.dispatch import Dispatcher, Work
from loadgen.replica.errors import RequestRefused
from loadgen.replica.forms import Part, read_form, required
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import GenerationFields
from loadgen.replica.routing import Route

# As if all audio were 16 kHz, 16 bit, mono, and 50 tokens a second up to Whisper's 30 s.
_BYTES_PER_S = 32_000
_BYTES_PER_TOKEN = 640
_MAX_AUDIO_TOKENS = 1500
_FORMATS = ("json", "text", "verbose_json")
_TRUE = ("true", "1", "on", "yes")


class Task(NamedTuple):
    """One of the two endpoints."""

    path: str
    object: str
    id_prefix: str


TASKS = (
    Task("/v1/audio/transcriptions", "transcription.chunk", "trsc-"),
    Task("/v1/audio/translations", "translation.chunk", "trsl-"),
)


class SpeechFormat:
    """Chunks and whole bodies of one transcription."""

    def __init__(self, task: Task, model: str, audio_bytes: int, language: str) -> None:
        self._head = {
            "id": task.id_prefix + uuid4().hex,
            "object": task.object,
            "created": int(time.time()),
            "model": model,
        }
        self._duration_s = audio_bytes / _BYTES_PER_S
        self._language = language

    def opening(self, sample: Sample) -> JSON | None:
        """There is no opening chunk."""
        return None

    def pieces(self, sample: Sample, start: int, end: int, last: bool) -> list[JSON]:
        """Tokens `start` to `end` of the text."""
        choice: JSON = {"delta": {"content": "".join(sample.pieces[start:end])}}
        if last:
            choice |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        return [{**self._head, "choices": [choice]}]

    def progress(self, usage: Usage) -> JSON:
        """The usage that each chunk carries if asked to."""
        return usage.counts()

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": usage.counts()}

    def brief(self, sample: Sample) -> JSON:
        """`response_format: json`."""
        seconds = max(1, round(self._duration_s))
        return {"text": sample.text, "usage": {"type": "duration", "seconds": seconds}}

    def verbose(self, sample: Sample) -> JSON:
        """`response_format: verbose_json`, all of it one segment."""
        segment = {
            "id": 0,
            "avg_logprob": -0.25,
            "compression_ratio": 1.5,
            "end": self._duration_s,
            "no_speech_prob": None,
            "seek": 0,
            "start": 0.0,
            "temperature": 0.0,
            "text": sample.text,
            "tokens": sample.ids,
        }
        return {
            "duration": str(self._duration_s),
            "language": self._language,
            "text": sample.text,
            "segments": [segment],
            "words": None,
        }


class AudioRoutes:
    """Transcriptions and translations; both read the same forms."""

    def __init__(self, reader: PromptReader, generator: Generator, dispatcher: Dispatcher) -> None:
        self._reader = reader
        self._generator = generator
        self._dispatcher = dispatcher

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [Route("POST", task.path, partial(self._answer, task)) for task in TASKS]

    def _answer(self, task: Task, exchange: Exchange) -> None:
        form = read_form(exchange.request)
        audio = required(form, "file", file=True)
        model = required(form, "model").text
        adapter = self._reader.adapter(model)
        kind = form["response_format"].text if "response_format" in form else "json"
        if kind not in _FORMATS:
            raise RequestRefused(f"response_format {kind!r} is not supported")
        fields = GenerationFields(max_tokens=_number(form, "max_completion_tokens"))
        if fields.max_tokens is not None and fields.max_tokens < 1:
            raise RequestRefused("max_completion_tokens must be at least 1")
        (sample,) = self._generator.samples([self._prompt(audio, form)], fields)
        language = form["language"].text if "language" in form else "en"
        bodies = SpeechFormat(task, model, len(audio.data), language)
        answer: Answer
        if _flag(form, "stream"):
            usage = _flag(form, "stream_include_usage")
            answer = StreamedAnswer(exchange, bodies, [sample], usage_wanted=(usage, False))
        else:
            answer = WholeAnswer(
                [sample], lambda samples, usage: _finish(exchange, bodies, kind, samples[0])
            )
        self._dispatcher.launch(exchange, answer, Work(adapter))
        if isinstance(answer, StreamedAnswer):
            answer.begin()

    def _prompt(self, audio: Part, form: dict[str, Part]) -> list[int]:
        """Ids that stand for the sound, and the client's own prompt."""
        size = self._reader.tokenizer.size
        room = min(_MAX_AUDIO_TOKENS, self._reader.served.max_model_len_tokens // 2)
        count = min(room, max(1, len(audio.data) // _BYTES_PER_TOKEN))
        digest = xxh3_64_intdigest(audio.data)
        seeds = (array("Q", (digest, place)).tobytes() for place in range(count))
        sound = [xxh3_64_intdigest(seed) % size for seed in seeds]
        guide = self._reader.tokenizer.encode(form["prompt"].text) if "prompt" in form else []
        return sound + guide


def _finish(exchange: Exchange, bodies: SpeechFormat, kind: str, sample: Sample) -> None:
    if kind == "text":
        exchange.respond(200, sample.text.encode(), "text/plain; charset=utf-8")
    elif kind == "verbose_json":
        respond_json(exchange, bodies.verbose(sample))
    else:
        respond_json(exchange, bodies.brief(sample))


def _flag(form: dict[str, Part], name: str) -> bool:
    return name in form and form[name].text.strip().lower() in _TRUE


def _number(form: dict[str, Part], name: str) -> int | None:
    if name not in form:
        return None
    try:
        return int(form[name].text)
    except ValueError as error:
        raise RequestRefused(f"{name} must be a number", kind="Bad Request", param=name) from error
