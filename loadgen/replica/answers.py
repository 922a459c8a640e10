"""JSON bodies of chat and completion answers, whole and in chunks, in vLLM's key order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.replica.generation import Sample
from loadgen.replica.logprobs import chat_logprobs, completion_logprobs
from loadgen.replica.requests import ChatRequest, CompletionRequest
from loadgen.replica.text import ReplicaTokenizer

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; `details`: whether chats and completions tell what was cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    details: bool = True

    def json(self) -> JSON:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens}
            if self.details
            else None,
        }


@dataclass(frozen=True, slots=True)
class Frame:
    """What every body of one answer begins with."""

    id: str
    created_s: int
    model: str

    def json(self, kind: str) -> JSON:
        """The leading fields for an object of this kind."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


class ChatFormat:
    """Bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"

    def __init__(self, request: ChatRequest, frame: Frame, tokenizer: ReplicaTokenizer) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._ids = bool(request.return_token_ids)
        self._logprobs = bool(request.logprobs)
        self._top = request.top_logprobs or 0

    def opening(self, sample: Sample) -> JSON:
        """The chunk with the role, which precedes all content of a choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._chunk([choice])
        body["prompt_token_ids"] = list(sample.prompt_ids) if self._ids else None
        return body

    def piece(self, sample: Sample, start: int, end: int, last: bool) -> JSON:
        """Tokens `start` to `end` of a choice."""
        ids = sample.ids[start:end]
        choice: JSON = {
            "index": sample.index,
            "delta": {"content": "".join(sample.pieces[start:end])},
            "logprobs": self._choice_logprobs(ids),
            "finish_reason": sample.finish_reason if last else None,
        }
        if last:
            choice["stop_reason"] = sample.stop_reason
        choice["token_ids"] = ids if self._ids else None
        return self._chunk([choice])

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage of a stream."""
        return {**self._chunk([]), "usage": usage.json()}

    def whole(self, samples: Sequence[Sample], usage: Usage) -> JSON:
        """The answer to a request that does not stream."""
        return {
            **self._frame.json("chat.completion"),
            "choices": [self._choice(sample) for sample in samples],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage.json(),
            "prompt_logprobs": None,
            "prompt_token_ids": list(samples[0].prompt_ids) if self._ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, sample: Sample) -> JSON:
        return {
            "index": sample.index,
            "message": {
                "role": "assistant",
                "content": sample.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": self._choice_logprobs(sample.ids),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "token_ids": sample.ids if self._ids else None,
        }

    def _chunk(self, choices: list[JSON]) -> JSON:
        return {**self._frame.json("chat.completion.chunk"), "choices": choices}

    def _choice_logprobs(self, ids: Sequence[int]) -> JSON | None:
        return chat_logprobs(self._tokenizer, ids, self._top) if self._logprobs else None


class CompletionFormat:
    """Bodies of /v1/completions."""

    id_prefix = "cmpl-"

    def __init__(
        self, request: CompletionRequest, frame: Frame, tokenizer: ReplicaTokenizer
    ) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._ids = bool(request.return_token_ids)
        self._echo = bool(request.echo)
        self._top = request.logprobs

    def opening(self, sample: Sample) -> JSON | None:
        """Completions have no opening chunk."""
        return None

    def piece(self, sample: Sample, start: int, end: int, last: bool) -> JSON:
        """Tokens `start` to `end` of a choice."""
        text = "".join(sample.pieces[start:end])
        choice = self._choice(sample, self._echoed(sample, start) + text, start, end)
        if not last:
            choice["finish_reason"] = choice["stop_reason"] = None
        choice["prompt_token_ids"] = list(sample.prompt_ids) if self._ids and not start else None
        return {**self._frame.json("text_completion"), "choices": [choice]}

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage of a stream."""
        return {**self._frame.json("text_completion"), "choices": [], "usage": usage.json()}

    def whole(self, samples: Sequence[Sample], usage: Usage) -> JSON:
        """The answer to a request that does not stream."""
        return {
            **self._frame.json("text_completion"),
            "choices": [self._whole_choice(sample) for sample in samples],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage.json(),
            "kv_transfer_params": None,
        }

    def _whole_choice(self, sample: Sample) -> JSON:
        text = self._echoed(sample, 0) + sample.text
        choice = self._choice(sample, text, 0, len(sample.ids))
        choice["prompt_logprobs"] = None
        choice["prompt_token_ids"] = list(sample.prompt_ids) if self._ids else None
        return choice

    def _choice(self, sample: Sample, text: str, start: int, end: int) -> JSON:
        ids = sample.ids[start:end]
        return {
            "index": sample.index,
            "text": text,
            "logprobs": self._choice_logprobs(sample, ids, start),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "token_ids": ids if self._ids else None,
        }

    def _echoed(self, sample: Sample, start: int) -> str:
        return self._tokenizer.decode(sample.prompt_ids) if self._echo and not start else ""

    def _choice_logprobs(self, sample: Sample, ids: Sequence[int], start: int) -> JSON | None:
        if self._top is None:
            return None
        offset = sum(map(len, sample.pieces[:start]))
        return completion_logprobs(self._tokenizer, ids, self._top, offset)


Format = ChatFormat | CompletionFormat


def total_usage(
    samples: Sequence[Sample], cached_tokens: int, generated_tokens: int, *, details: bool = True
) -> Usage:
    """Usage over all choices; a prompt counts once however many samples it has."""
    prompts = {id(sample.prompt_ids): len(sample.prompt_ids) for sample in samples}
    return Usage(sum(prompts.values()), generated_tokens, cached_tokens, details)
