"""Bodies and events of /v1/responses, in vLLM's key order."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgen.replica.answers import JSON, Usage, random_id
from loadgen.replica.errors import RequestRefused
from loadgen.replica.generation import Sample
from loadgen.replica.requests import ChatRequest

_SKIPPED_ITEMS = ("reasoning", "web_search_call", "item_reference")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses, as far as it matters here."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = True
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = "disabled"
    user: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None

    def chat(self, history: list[JSON]) -> ChatRequest:
        """The chat request it stands for, after what was said before."""
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatRequest(
            messages=[*opening, *history, *input_messages(self.input)],
            model=self.model,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=[_chat_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=self.tool_choice,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )


def input_messages(given: str | list[dict[str, Any]]) -> list[JSON]:
    """Chat messages of `input`. Raises RequestRefused for items that are none."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    listed = [_item_message(item) for item in given]
    return [message for message in listed if message is not None]


def _item_message(item: dict[str, Any]) -> JSON | None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name", ""), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        return {"role": "tool", **output}
    if kind in _SKIPPED_ITEMS:
        return None
    raise RequestRefused(f"input items of type {kind!r} are not supported", param="input")


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Responses name a function beside its type, chat templates expect it below."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


class ResponseFormat:
    """One response: its whole bodies in each state, and the events of its stream."""

    def __init__(
        self, request: ResponsesRequest, model: str, created_s: int, max_output_tokens: int
    ) -> None:
        self.id = request.request_id or f"resp_{random_id()}"
        self._item_id = f"msg_{random_id()}"
        self._request = request
        self._model = model
        self._created_s = created_s
        self._max_output_tokens = max_output_tokens
        self._sequence = 0

    def state(self, status: str) -> JSON:
        """The response before it has any output."""
        return self._body(status, [], None, None)

    def finished(self, sample: Sample, usage: Usage) -> JSON:
        """The response with its output."""
        status = {"length": "incomplete", "abort": "cancelled"}.get(
            sample.finish_reason, "completed"
        )
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._body(status, [self._message(sample.text)], usage, reason)

    def begin(self) -> list[tuple[str, JSON]]:
        """Told at once, before the engine has looked at the request."""
        body = self.state("in_progress")
        return [
            self._event("response.created", {"response": body}),
            self._event("response.in_progress", {"response": body}),
        ]

    def opening(self, usage: Usage) -> list[tuple[str, JSON]]:
        """With the first token."""
        item = {**self._message(""), "content": [], "status": "in_progress"}
        return [
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", {**self._place(), "part": _part("", [])}),
        ]

    def delta(self, text: str) -> list[tuple[str, JSON]]:
        """A piece of text."""
        data = self._told("delta", text)
        return [self._event("response.output_text.delta", data)]

    def closing(self, sample: Sample, usage: Usage) -> list[tuple[str, JSON]]:
        """After the last token."""
        text = sample.text
        done = self._told("text", text)
        item = {"item": self._message(text), "output_index": 0}
        return [
            self._event("response.output_text.done", done),
            self._event("response.content_part.done", {**self._place(), "part": _part(text)}),
            self._event("response.output_item.done", item),
            self._event("response.completed", {"response": self.finished(sample, usage)}),
        ]

    def _event(self, kind: str, data: JSON) -> tuple[str, JSON]:
        number, self._sequence = self._sequence, self._sequence + 1
        return kind, dict(sorted({**data, "sequence_number": number, "type": kind}.items()))

    def _place(self) -> JSON:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _told(self, name: str, text: str) -> JSON:
        # vLLM's keys are in alphabetical order here.
        return dict(sorted({**self._place(), name: text, "logprobs": []}.items()))

    def _message(self, text: str) -> JSON:
        return {
            "id": self._item_id,
            "content": [_part(text)],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }

    def _body(self, status: str, output: list[JSON], usage: Usage | None, why: Any) -> JSON:
        request = self._request
        return {
            "id": self.id,
            "created_at": self._created_s,
            "incomplete_details": why,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": request.tool_choice if request.tools else "none",
            "tools": request.tools or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "background": bool(request.background),
            "max_output_tokens": self._max_output_tokens,
            "max_tool_calls": None,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "reasoning": request.reasoning,
            "service_tier": "auto",
            "status": status,
            "text": request.text,
            "top_logprobs": None,
            "truncation": request.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _part(text: str, logprobs: list[Any] | None = None) -> JSON:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
