"""Anthropic's /v1/messages, answered as vLLM does: by way of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson

from loadgen.replica.answering import EventAnswer, WholeAnswer, respond_json
from loadgen.replica.answers import JSON, ChatFormat, Frame, Usage, random_id
from loadgen.replica.dispatch import Dispatcher
from loadgen.replica.errors import InvalidBody
from loadgen.replica.generating import work
from loadgen.replica.generation import Generator, Sample
from loadgen.replica.http import Exchange
from loadgen.replica.prompts import PromptReader
from loadgen.replica.requests import ChatRequest, check_chat, read_json
from loadgen.replica.routing import Route
from loadgen.replica.tools import forced_text

# A hash that changes with every request, put there by one client: vLLM leaves it out.
_ATTRIBUTION = "x-anthropic-billing-header"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}

Blocks = str | list[dict[str, Any]]


class Message(msgspec.Struct):
    """One turn; a system message may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None


def chat_request(request: CountRequest) -> ChatRequest:
    """The chat request that an Anthropic request stands for."""
    chat = ChatRequest(
        messages=_chat_messages(request),
        model=request.model,
        tools=[_chat_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_chat_tool_choice(request.tool_choice or {}),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.stream = request.stream
        chat.temperature = request.temperature
        chat.top_p = request.top_p
        chat.cache_salt = request.cache_salt
    return chat


def _chat_messages(request: CountRequest) -> list[JSON]:
    texts = _system_texts(request.system)
    for message in request.messages:
        if message.role == "system":
            texts += _system_texts(message.content)
    messages: list[JSON] = [{"role": "system", "content": "".join(texts)}] if texts else []
    for message in request.messages:
        if message.role != "system":
            messages += _turn(message.role, message.content)
    return messages


def _system_texts(content: Blocks | None) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    texts = [block.get("text") or "" for block in content or () if block.get("type") == "text"]
    return [text for text in texts if text and not text.startswith(_ATTRIBUTION)]


def _turn(role: str, content: Blocks) -> list[JSON]:
    """One message as chat messages: results of tools come first, on their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[JSON] = []
    parts: list[JSON] = []
    calls: list[JSON] = []
    for block in content:
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url"})
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            results.append(_tool_result(block))
    turn: JSON = {"role": role, "content": parts or None}
    if calls:
        turn["tool_calls"] = calls
    return results if role == "user" and not parts else [*results, turn]


def _call(block: dict[str, Any]) -> JSON:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool_result(block: dict[str, Any]) -> JSON:
    content = block.get("content") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text or "" for text in texts)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _chat_tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"none": "none", "any": "required"}.get(str(kind))


def _chat_tool(tool: dict[str, Any]) -> JSON:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": {"type": "object", **(tool.get("input_schema") or {})},
    }
    return {"type": "function", "function": function}


class MessageFormat:
    """Bodies and events of one message."""

    def __init__(self, frame: Frame, prompt_tokens: int, tool: str | None = None) -> None:
        self._frame = frame
        self._tool = tool
        self._prompt_tokens = prompt_tokens

    def whole(self, sample: Sample, usage: Usage) -> JSON:
        """The answer to a request that does not stream."""
        text: JSON = {"type": "text", "text": sample.text}
        if self._tool is not None:
            text = {**self._call(), "input": _arguments(sample)}
        stop = self._stop_reason(sample)
        content = [text] if sample.text else []
        return {**self._message(content), "stop_reason": stop, "usage": _usage(usage)}

    def begin(self) -> list[tuple[str, JSON]]:
        """Nothing comes before the first token."""
        return []

    def opening(self, usage: Usage) -> list[tuple[str, JSON]]:
        """With the first token."""
        used = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": used}
        empty = {"type": "text", "text": ""}
        block = empty if self._tool is None else {**self._call(), "input": {}}
        return [
            _event("message_start", {"message": message}),
            _event("content_block_start", {"content_block": block, "index": 0}),
        ]

    def delta(self, text: str) -> list[tuple[str, JSON]]:
        """A piece of text."""
        delta = {"type": "text_delta", "text": text}
        if self._tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [_event("content_block_delta", {"delta": delta, "index": 0})]

    def closing(self, sample: Sample, usage: Usage) -> list[tuple[str, JSON]]:
        """After the last token."""
        delta = {"stop_reason": self._stop_reason(sample), "stop_sequence": None}
        return [
            _event("content_block_stop", {"index": 0}),
            _event("message_delta", {"delta": delta, "usage": _usage(usage)}),
            _event("message_stop", {}),
        ]

    def _call(self) -> JSON:
        return {"type": "tool_use", "id": f"chatcmpl-tool-{random_id()}", "name": self._tool}

    def _stop_reason(self, sample: Sample) -> str | None:
        if self._tool is not None and sample.finish_reason == "stop":
            return "tool_use"
        return _STOP_REASONS.get(sample.finish_reason)

    def _message(self, content: list[JSON]) -> JSON:
        frame = self._frame
        head = {"id": frame.id, "type": "message", "role": "assistant"}
        return {**head, "content": content, "model": frame.model}


def _arguments(sample: Sample) -> JSON:
    """What a call that `max_tokens` cut off passes on is nothing."""
    return {} if sample.finish_reason == "length" else orjson.loads(sample.text)


def _event(kind: str, data: JSON) -> tuple[str, JSON]:
    return kind, {"type": kind, **data}


def _usage(usage: Usage) -> JSON:
    if not usage.details:
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.created_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": usage.created_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


class MessageRoutes:
    """Messages and their token counts."""

    def __init__(self, reader: PromptReader, generator: Generator, dispatcher: Dispatcher) -> None:
        self._reader = reader
        self._generator = generator
        self._dispatcher = dispatcher

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/messages", self._create),
            Route("POST", "/v1/messages/count_tokens", self._count),
        ]

    def _create(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, MessagesRequest)
        if request.max_tokens < 1:
            raise InvalidBody("body.max_tokens", "Value error, max_tokens must be positive")
        chat, adapter = self._chat(request)
        prompt = self._reader.chat_ids(chat)
        (sample,) = self._generator.samples([prompt], chat, forced_text(chat))
        frame = self._reader.frame(exchange.request, chat, ChatFormat.id_prefix)
        form = MessageFormat(frame, len(prompt), chat.forced_tool())
        details = self._dispatcher.setup.prompt_tokens_details
        if request.stream:
            answer = EventAnswer(exchange, form, sample, details=details)
            self._dispatcher.launch(exchange, answer, work(chat, adapter))
            answer.begin()
            return

        def whole(samples: Sequence[Sample], usage: Usage) -> None:
            respond_json(exchange, form.whole(samples[0], usage))

        whole_answer = WholeAnswer([sample], whole, details=details)
        self._dispatcher.launch(exchange, whole_answer, work(chat, adapter))

    def _count(self, exchange: Exchange) -> None:
        chat, _ = self._chat(read_json(exchange.request, CountRequest))
        tokens = len(self._reader.chat_ids(chat))
        context = {"original_input_tokens": tokens}
        respond_json(exchange, {"input_tokens": tokens, "context_management": context})

    def _chat(self, request: CountRequest) -> tuple[ChatRequest, str]:
        chat = chat_request(request)
        check_chat(chat)
        return chat, self._reader.adapter(chat.model)
