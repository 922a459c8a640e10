"""Request bodies, as far as a simulated replica reads them. Unknown fields are accepted."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

from loadgen.replica.errors import InvalidBody, InvalidValue, RequestRefused
from loadgen.replica.http import HTTPRequest

Body = TypeVar("Body", bound=msgspec.Struct)
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_MAX_TOP_LOGPROBS = 20
_MAX_SAMPLES = 128
_DEFAULT_COMPLETION_TOKENS = 16
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_SALT_CHARS = 128
_MEDIA = ("image", "video", "audio", "input_audio", "file")
_NOT_IN_SALTS = re.compile(r"[@/\\\0]")
# msgspec's reports: the steps of a path, and the name of a field that is missing.
_STEP = re.compile(r"[^.\[\]`]+")
_MISSING = re.compile(r"missing required field `(.*)`")
# Of the kinds of message that vLLM's checker tries in turn, its reports name the first.
_BOTH = (
    "continue_final_message and add_generation_prompt are not compatible. Use "
    "continue_final_message when you want the model to continue the final message, and "
    "add_generation_prompt when you want to add a header that will prompt it to start a new "
    "assistant message instead."
)
_MESSAGE_KIND = "ChatCompletionDeveloperMessageParam"


class StreamOptions(msgspec.Struct):
    """`stream_options` of both endpoints."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completion requests have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: NonNegative | None = 0
    n: int | None = 1
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
    prompt_logprobs: int | None = None

    def stops(self) -> list[str]:
        """Stop strings, none of them empty."""
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in listed if text]

    def limit(self) -> int | None:
        """The client's bound on generated tokens."""
        return self.max_tokens

    def only_echo(self) -> bool:
        """Whether the prompt alone is to be sent back."""
        return False

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

    def tool_names(self) -> list[str]:
        """Names of the functions that the client offers."""
        functions = (tool.get("function") for tool in self.tools or ())
        return [str(each["name"]) for each in functions if each and "name" in each]

    def forced_tool(self) -> str | None:
        """The function that the reply has to call, if it must call one."""
        if self.tool_choice == "required":
            return next(iter(self.tool_names()), None)
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        return function.get("name") if isinstance(function, dict) else None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` may be text, token ids or a list of either."""

    prompt: str | list[Any] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    def limit(self) -> int | None:
        """`max_tokens`, which is 16 where the client says nothing or null."""
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def only_echo(self) -> bool:
        """vLLM then generates one token that nobody sees."""
        return bool(self.echo) and self.max_tokens == 0


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
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind="Bad Request",
        )
    return parse(http.body, kind)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body. Raises InvalidBody that names the offending field."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(body, str(error)) from error


def _misfit(report: str) -> InvalidBody:
    """What msgspec found wrong, at the place where FastAPI would name it."""
    message, _, place = report.partition(" - at `$")
    missing = _MISSING.search(message)
    steps = [*_STEP.findall(place), *(missing.groups() if missing else ())]
    return InvalidBody(".".join(["body", *steps]), "Field required" if missing else message)


def _no_json(body: bytes, report: str) -> InvalidBody:
    if not body:
        return InvalidBody("body", "Field required")
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return InvalidBody(f"body.{error.pos}", f"JSON decode error: {error.msg}")
    except (ValueError, RecursionError):
        pass
    return InvalidBody("body", f"JSON decode error: {report}")


def check_generation(request: GenerationFields) -> None:
    """Refuse values that vLLM refuses, whatever the endpoint."""
    _check_salt(request.cache_salt)
    if request.stream_options is not None and not request.stream:
        message = "Stream options can only be defined when `stream=True`."
        raise InvalidValue(message, "stream_options")
    samples = 1 if request.n is None else request.n
    if samples < 1:
        raise RequestRefused(f"n must be at least 1, got {samples}.")
    if samples > _MAX_SAMPLES:
        raise RequestRefused(f"n must be at most {_MAX_SAMPLES}, got {samples}.")
    if samples > 1 and request.temperature == 0:
        raise RequestRefused(f"n must be 1 when using greedy sampling, got {samples}.")
    temperature, top_p, limit = request.temperature, request.top_p, request.limit()
    if temperature is not None and temperature < 0:
        message = f"temperature must be non-negative, got {temperature}."
        raise InvalidValue(message, "temperature", temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidValue(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if limit is not None and (limit < 0 or (limit == 0 and not request.only_echo())):
        raise InvalidValue(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    least = request.min_tokens or 0
    if limit and least > limit:
        raise RequestRefused(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        )


def _check_salt(salt: str | None) -> None:
    if salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise InvalidValue(message, "cache_salt")
    if salt and (len(salt) > _MAX_SALT_CHARS or _NOT_IN_SALTS.search(salt)):
        raise InvalidValue(
            f"Parameter 'cache_salt' must be at most {_MAX_SALT_CHARS} characters and must "
            "not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )


def check_chat(request: ChatRequest) -> None:
    """Refuse chat requests that vLLM refuses."""
    for place, message in enumerate(request.messages):
        where = f"body.messages.{place}.{_MESSAGE_KIND}"
        if not isinstance(message.get("role"), str):
            raise InvalidBody(f"{where}.role", "Field required")
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidBody(f"{where}.content", "Input should be a valid string")
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        told = "when using `top_logprobs`, `logprobs` must be set to true."
        raise InvalidValue(told, "top_logprobs")
    wanted = request.response_format
    if isinstance(wanted, dict) and wanted.get("type") not in _FORMATS:
        raise InvalidBody("body.response_format.type", "Input should be a known type")
    check_tool_choice(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestRefused(_BOTH)
    if not request.messages:
        raise RequestRefused(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    check_generation(request)
    _check_logprobs(top)


def check_tool_choice(request: ChatRequest) -> None:
    """Refuse a choice of tools that are not there."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not request.tools:
        raise InvalidValue("When using `tool_choice`, `tools` must be set.", "tool_choice")
    wanted = request.forced_tool()
    if wanted is None or wanted not in request.tool_names():
        raise InvalidValue(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            "tool_choice",
        )


def check_completion(request: CompletionRequest, vocabulary_tokens: int) -> None:
    """Refuse completion requests that vLLM refuses."""
    if request.prompt is None or request.prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise InvalidValue(message, "prompt")
    if request.suffix:
        raise RequestRefused(
            "suffix is only supported for models with FIM completion rendering", param="suffix"
        )
    if request.prompt == []:
        raise RequestRefused("You must pass at least one prompt")
    check_generation(request)
    # -1 stands for the whole vocabulary, which is more than vLLM gives by default.
    _check_logprobs(vocabulary_tokens if request.logprobs == -1 else request.logprobs or 0)


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
    raise InvalidBody(
        "body.prompt.0" if isinstance(prompt, list) else "body.prompt",
        "Input should be a string, a list of strings, token ids or a list of those",
    )


def plain_messages(messages: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Messages with their content parts joined into one text, as vLLM does for such models."""
    return [
        {**message, "content": _plain_content(message.get("content"), model)}
        for message in messages
    ]


def _plain_content(content: Any, model: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRefused("content must be a string or a list of parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else _part_text(part, model)
        texts.append(text)
    return "\n".join(texts)


def _part_text(part: Any, model: str) -> str:
    if isinstance(part, dict) and str(part.get("type")).startswith(_MEDIA):
        raise RequestRefused(f"{model} is not a multimodal model")
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestRefused("1 validation error: a part of the content is of no known type")
    return text


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_logprobs(value: int) -> None:
    if value < 0:
        raise InvalidValue(f"logprobs must be non-negative, got {value}.", "logprobs", value)
    if value > _MAX_TOP_LOGPROBS:
        raise InvalidValue(
            f"Requested sample logprobs of {value}, which is greater than max allowed: "
            f"{_MAX_TOP_LOGPROBS}",
            "logprobs",
            value,
        )
