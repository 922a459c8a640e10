"""A request's prompt as token ids: the few fields read, the template rendered, text tokenized.

Identity decides routing only. When it cannot be had (unknown fields, images, no tokenizer in
time), the request is served all the same, placed on load alone.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson

from cache_index.blocks import pack_tokens
from router.errors import InvalidRequest
from router.templating import Limits, RenderError
from router.tokenizing import ModelTokenizer

MAX_LENIENT_BYTES = 1 << 20
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"


class Request(NamedTuple):
    """The fields of a generation request that the gateway reads; nothing is written back."""

    path: str
    model: str
    stream: bool
    salt: str
    fields: dict[str, Any]


def parse_request(path: str, body: bytes) -> Request:
    """Read a body. Raises InvalidRequest when it is not a JSON object or names no model."""
    fields = load_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("`model` is required and must be a string.", param="model")
    if path in (CHAT_PATH, MESSAGES_PATH) and not isinstance(fields.get("messages"), list):
        raise InvalidRequest("`messages` is required and must be an array.", param="messages")
    if path == COMPLETIONS_PATH and not isinstance(fields.get("prompt"), str | list):
        message = "`prompt` is required: a string, an array of strings or token ids."
        raise InvalidRequest(message, param="prompt")
    salt = fields.get("cache_salt")
    return Request(
        path, model, fields.get("stream") is True, salt if isinstance(salt, str) else "", fields
    )


def load_object(body: bytes) -> dict[str, Any]:
    """A JSON object's fields. Raises InvalidRequest."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = _load_leniently(body)
    if not isinstance(fields, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return fields


def _load_leniently(body: bytes) -> Any:
    """What the engine's parser takes and orjson does not: lone surrogates, 1e400, NaN."""
    if len(body) > MAX_LENIENT_BYTES:
        # The lenient parser is slow, and nobody else is served meanwhile.
        raise InvalidRequest(
            "The request body is not strict JSON (RFC 8259), which one of this size must be: "
            "no NaN or Infinity, no lone surrogates, no numbers beyond double precision."
        )
    try:
        return json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        message = f"The request body is not valid UTF-8 (byte {error.start})."
    except RecursionError:
        message = "The request body is nested too deeply."
    except ValueError as error:
        message = f"The request body is not valid JSON: {error}."
    raise InvalidRequest(message)


def given_tokens(request: Request) -> bytes | None:
    """Packed ids where the request itself carries token ids, else None."""
    prompt = first_prompt(request.fields["prompt"]) if request.path == COMPLETIONS_PATH else None
    if not isinstance(prompt, list):
        return None
    try:
        return pack_tokens(prompt)
    except (OverflowError, TypeError, ValueError):
        return None


def local_tokens(
    request: Request, tokenizer: ModelTokenizer, limits: Limits = Limits()
) -> bytes | None:
    """The prompt's token ids as packed u32, or None when only the engine knows them.

    A chat is rendered with the model's template; of a list of prompts the first one counts.
    """
    try:
        if request.path == CHAT_PATH:
            return tokenizer.chat(request.fields, limits)
        if request.path != COMPLETIONS_PATH:
            return None
        prompt = first_prompt(request.fields["prompt"])
        if not isinstance(prompt, str):
            return None
        special = request.fields.get("add_special_tokens", True) is not False
        return tokenizer.text(prompt, add_special_tokens=special)
    except (RenderError, TypeError, ValueError):
        return None


def first_prompt(prompt: Any) -> str | list[int] | None:
    """The first of what `prompt` holds: text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        return None
    if type(prompt[0]) is int:
        return prompt
    return first_prompt(prompt[0]) if isinstance(prompt[0], str | list) else None


def tokenize_call(request: Request) -> dict[str, Any] | None:
    """The body of a replica's POST /tokenize for this prompt, or None where it needs no call."""
    if request.path == CHAT_PATH:
        kept = (
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
        )
        call = {name: request.fields[name] for name in kept if name in request.fields}
        return {"model": request.model, **call}
    if request.path != COMPLETIONS_PATH:
        return None
    prompt = first_prompt(request.fields["prompt"])
    if not isinstance(prompt, str):
        return None
    special = request.fields.get("add_special_tokens", True)
    return {"model": request.model, "prompt": prompt, "add_special_tokens": special}
