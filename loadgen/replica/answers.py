"""JSON bodies of chat and completion answers, whole and in chunks, in vLLM's key order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from loadgen.replica.generation import Sample
from loadgen.replica.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from loadgen.replica.requests import ChatRequest, CompletionRequest, GenerationFields
from loadgen.replica.text import ReplicaTokenizer

JSON = dict[str, Any]
VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-51a70b1e"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. `created_tokens` are those of the prompt that entered the cache.

    `details`: whether chats, completions and messages tell what was cached.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int = 0
    details: bool = True

    def counts(self) -> JSON:
        """What every `usage` object begins with."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def whole(self, created_tokens: int | None) -> JSON:
        """`usage` of an answer in one piece."""
        details = {"cached_tokens": self.cached_tokens, "created_cache_tokens": created_tokens}
        details["multimodal_tokens"] = None
        return {
            **self.counts(),
            "prompt_tokens_details": details if self.details else None,
            "completion_tokens_details": None,
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


def random_id() -> str:
    """As long as vLLM's."""
    return uuid4().hex[:16]


class ChatFormat:
    """Bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"

    def __init__(self, request: ChatRequest, frame: Frame, tokenizer: ReplicaTokenizer) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._tool = request.forced_tool()
        self._ids = bool(request.return_token_ids)
        self._logprobs = bool(request.logprobs)
        self._top = request.top_logprobs or 0
        self._prompt_top = request.prompt_logprobs
        self._fingerprint = _stamp(request)

    def opening(self, sample: Sample) -> JSON | None:
        """The chunk with the role, which precedes all content of a choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._chunk([choice])
        body["prompt_token_ids"] = list(sample.prompt_ids) if self._ids else None
        body["prompt_text"] = None
        return body

    def pieces(self, sample: Sample, start: int, end: int, last: bool) -> list[JSON]:
        """Tokens `start` to `end` of a choice; a tool's name comes before its arguments."""
        text = "".join(sample.pieces[start:end])
        if self._tool is None:
            return [self._piece(sample, start, end, last, {"content": text})]
        named: JSON = {"id": _tool_id(), "type": "function", "index": 0}
        named["function"] = {"name": self._tool}
        told = [] if start else [self._piece(sample, 0, 0, False, _call_delta(named))]
        delta = _call_delta({"index": 0, "function": {"arguments": text}}) if text else {}
        return [*told, self._piece(sample, start, end, last, delta)]

    def _piece(self, sample: Sample, start: int, end: int, last: bool, delta: JSON) -> JSON:
        ids = sample.ids[start:end]
        choice: JSON = {
            "index": sample.index,
            "delta": delta,
            "logprobs": self._choice_logprobs(ids),
            "finish_reason": sample.finish_reason if last else None,
        }
        if last:
            choice["stop_reason"] = sample.stop_reason
        choice["token_ids"] = ids if self._ids else None
        return self._chunk([choice]) | (self._fingerprint if last else {})

    def progress(self, usage: Usage) -> JSON:
        """The usage that each chunk carries if asked to."""
        return {**usage.counts(), "completion_tokens_details": None}

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage of a stream."""
        details = {"cached_tokens": usage.cached_tokens}
        details["created_cache_tokens"] = usage.created_tokens
        counted = usage.counts()
        if usage.details:
            counted["prompt_tokens_details"] = details
        return {**self._chunk([]), "usage": counted, "system_fingerprint": FINGERPRINT}

    def whole(self, samples: Sequence[Sample], usage: Usage) -> JSON:
        """The answer to a request that does not stream."""
        prompt_ids, top = samples[0].prompt_ids, self._prompt_top
        return {
            **self._frame.json("chat.completion"),
            "choices": [self._choice(sample) for sample in samples],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage.whole(usage.created_tokens),
            "prompt_logprobs": prompt_logprobs(self._tokenizer, prompt_ids, top),
            "prompt_token_ids": list(prompt_ids) if self._ids else None,
            "prompt_text": None,
            **_NOT_HERE,
        }

    def _choice(self, sample: Sample) -> JSON:
        message: JSON = {
            "role": "assistant",
            "content": sample.text if self._tool is None else "",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if self._tool is not None:
            function = {"name": self._tool, "arguments": sample.text}
            call = {"id": _tool_id(), "type": "function", "function": function}
            message["tool_calls"] = [call]
        return {
            "index": sample.index,
            "message": {**message, "reasoning": None},
            "logprobs": self._choice_logprobs(sample.ids),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "token_ids": sample.ids if self._ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[JSON]) -> JSON:
        return {**self._frame.json("chat.completion.chunk"), "choices": choices}

    def _choice_logprobs(self, ids: Sequence[int]) -> JSON | None:
        return chat_logprobs(self._tokenizer, ids, self._top) if self._logprobs and ids else None


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
        self._only_echo = request.only_echo()
        self._top = request.logprobs
        self._prompt_top = request.prompt_logprobs
        if self._echo and self._prompt_top is None:
            self._prompt_top = request.logprobs
        self._fingerprint = _stamp(request)

    def opening(self, sample: Sample) -> JSON | None:
        """Completions have no opening chunk."""
        return None

    def pieces(self, sample: Sample, start: int, end: int, last: bool) -> list[JSON]:
        """Tokens `start` to `end` of a choice."""
        choice = self._choice(sample, start, end)
        if not last:
            choice["finish_reason"] = choice["stop_reason"] = None
        told = not start and (self._ids or self._echo)
        choice["prompt_token_ids"] = list(sample.prompt_ids) if told else None
        choice["token_ids"] = choice.pop("token_ids")
        body = {**self._frame.json("text_completion"), "choices": [choice]}
        return [body | (self._fingerprint if last else {})]

    def progress(self, usage: Usage) -> JSON:
        """The usage that each chunk carries if asked to."""
        return usage.counts()

    def closing(self, usage: Usage) -> JSON:
        """The chunk that carries the usage of a stream."""
        counted = usage.counts()
        if usage.details:
            counted["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        body = {**self._frame.json("text_completion"), "choices": [], "usage": counted}
        return {**body, "system_fingerprint": FINGERPRINT}

    def whole(self, samples: Sequence[Sample], usage: Usage) -> JSON:
        """The answer to a request that does not stream."""
        return {
            **self._frame.json("text_completion"),
            "choices": [self._whole_choice(sample) for sample in samples],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage.whole(None),
            **_NOT_HERE,
        }

    def _whole_choice(self, sample: Sample) -> JSON:
        listed = prompt_logprobs(self._tokenizer, sample.prompt_ids, self._prompt_top)
        return {
            **self._choice(sample, 0, len(sample.ids)),
            "prompt_logprobs": listed,
            "prompt_token_ids": list(sample.prompt_ids) if self._ids else None,
            "routed_experts": None,
        }

    def _choice(self, sample: Sample, start: int, end: int) -> JSON:
        ids = sample.ids[start:end]
        text = "" if self._only_echo else "".join(sample.pieces[start:end])
        echoed = self._echo and not start
        return {
            "index": sample.index,
            "text": self._tokenizer.decode(sample.prompt_ids) + text if echoed else text,
            "logprobs": self._choice_logprobs(sample, ids, start),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "token_ids": ids if self._ids else None,
        }

    def _choice_logprobs(self, sample: Sample, ids: Sequence[int], start: int) -> JSON | None:
        if self._top is None:
            return None
        prompt = sample.prompt_ids if self._echo else ()
        before = self._tokenizer.decode(prompt) if start else ""
        offset = len(before) + sum(map(len, sample.pieces[:start]))
        shown = [] if self._only_echo else ids
        told = prompt if not start else ()
        return completion_logprobs(self._tokenizer, shown, self._top, offset, told)


Format = ChatFormat | CompletionFormat
_NOT_HERE: JSON = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def _stamp(request: GenerationFields) -> JSON:
    """What the last chunk of a choice carries where no chunk with the usage follows."""
    return {} if request.usage_wanted()[0] else {"system_fingerprint": FINGERPRINT}


def _tool_id() -> str:
    return f"chatcmpl-tool-{random_id()}"


def _call_delta(call: JSON) -> JSON:
    return {"content": None, "tool_calls": [call]}
