"""Request bodies, as far as a simulated replica reads them. Unknown fields are accepted."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from loadgen.replica.errors import RequestRefused
from loadgen.replica.http import HTTPRequest

Body = TypeVar("Body", bound=msgspec.Struct)
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
_MAX_TOP_LOGPROBS = 20
_MAX_SAMPLES = 128


class StreamOptions(msgspec.Struct):
    """`stream_options` of both endpoints."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completion requests have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: NonNegative | None = 0
    n: Positive | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None

    def stops(self) -> list[str]:
        """Stop strings, none of them empty."""
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in listed if text]

    def limit(self) -> int | None:
        """The client's bound on generated tokens."""
        return self.max_tokens

    def usage_wanted(self) -> tuple[bool, bool]:
        """Whether a stream ends with usage, and whether every chunk carries it."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return False, False
        return True, bool(options.continuous_usage_stats)


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Any = None

    def limit(self) -> int | None:
        """`max_completion_tokens`, or the older `max_tokens`."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` may be text, token ids or a list of either."""

    prompt: str | list[Any] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[NonNegative]


def read_json(http: HTTPRequest, kind: type[Body]) -> Body:
    """The JSON body of a request. Raises RequestRefused (400), also for other content types."""
    given = http.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(
            "Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )
    return parse(http.body, kind)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body. Raises RequestRefused (400) that names the offending field."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise RequestRefused(f"validation error: {error}", kind="Bad Request") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(f"JSON decode error: {error}", kind="Bad Request") from error


def check_generation(request: GenerationFields) -> None:
    """Refuse values that vLLM refuses, whatever the endpoint."""
    if request.cache_salt == "":
        raise RequestRefused(
            "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    if (request.n or 1) > _MAX_SAMPLES:
        raise RequestRefused(f"n must be at most {_MAX_SAMPLES}", param="n")
    if request.stream_options is not None and not request.stream:
        raise RequestRefused(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    _check_range("temperature", request.temperature, 0.0, None)
    _check_range("top_p", request.top_p, 0.0, 1.0)
    limit = request.limit()
    if limit is not None and limit < 1:
        raise RequestRefused(f"max_tokens must be at least 1, got {limit}", param="max_tokens")


def check_chat(request: ChatRequest) -> None:
    """Refuse chat requests that vLLM refuses."""
    check_generation(request)
    if not request.messages:
        raise RequestRefused("messages must not be empty", param="messages")
    for message in request.messages:
        if not isinstance(message.get("role"), str):
            raise RequestRefused("each message needs a role", param="messages")
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        raise RequestRefused(
            "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
        )
    _check_logprobs(top, "top_logprobs")


def check_completion(request: CompletionRequest) -> None:
    """Refuse completion requests that vLLM refuses."""
    check_generation(request)
    if request.prompt is None or request.prompt == []:
        raise RequestRefused("Either prompt or prompt_embeds must be provided", param="prompt")
    if request.suffix:
        raise RequestRefused("suffix is not currently supported", param="suffix")
    _check_logprobs(request.logprobs or 0, "logprobs")


def completion_prompts(prompt: str | list[Any] | None) -> list[str | list[int]]:
    """Each prompt of a completion request, as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    listed = prompt or []
    if _are_token_ids(listed):
        return [listed]
    if all(isinstance(one, str) for one in listed):
        return list(listed)
    if all(isinstance(one, list) and one and _are_token_ids(one) for one in listed):
        return list(listed)
    raise RequestRefused(
        "prompt must be a string, a list of strings, token ids or a list of those",
        param="prompt",
    )


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content parts joined into one text, as vLLM does for such models."""
    return [{**message, "content": _plain_content(message.get("content"))} for message in messages]


def _plain_content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRefused("content must be a string or a list of parts", param="messages")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else _part_text(part)
        texts.append(text)
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestRefused("only text parts are supported by this model", param="messages")
    return text


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestRefused(f"{name} must be {bounds}, got {value}", param=name)


def _check_logprobs(value: int, name: str) -> None:
    if not 0 <= value <= _MAX_TOP_LOGPROBS:
        raise RequestRefused(f"{name} must be in [0, {_MAX_TOP_LOGPROBS}]", param=name)
