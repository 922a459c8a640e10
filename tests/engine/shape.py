"""What of two answers is compared: everything but what a model makes up, a clock or chance.

Generated text, ids, times and log probabilities are reduced to their type; all else stays, token
counts and cached tokens included. Of streams the order of different chunks counts, not how many
alike follow each other: an engine whose reader is late sends several tokens at once. Of the
checker's long reports on wrong types only the field counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

MADE_UP = frozenset(
    {
        *("content", "text", "token", "tokens", "bytes", "logprob", "rank", "decoded_token"),
        *("token_logprobs", "text_offset", "token_ids", "arguments", "partial_json", "delta"),
    }
)
CLOCKS = frozenset(("created", "created_at", "completed_at"))
HEADERS = ("content-type", "x-request-id", "transfer-encoding", "retry-after", "allow", "server")
HEX = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*")
PORT = re.compile(r"(?<=tcp://\*):\d+")
SERIES = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? \S+$")
LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')
Shape = Any


def answer_shape(answer: httpx.Response) -> dict[str, Shape]:
    """Status, headers that matter and body of an answer."""
    headers = {name: value_shape(answer.headers.get(name)) for name in HEADERS}
    return {"status": answer.status_code, "headers": headers, "body": body_shape(answer)}


def body_shape(answer: httpx.Response) -> Shape:
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return stream_shape(answer.text)
    if kind.startswith("application/json") and answer.text:
        return value_shape(json.loads(answer.text))
    if "# TYPE" in answer.text:
        return metrics_shape(answer.text)
    return answer.text


def value_shape(value: Any, key: str = "", made_up: bool = False) -> Shape:
    """`value` without what differs between two runs of one engine."""
    if isinstance(value, dict):
        if key in ("top_logprobs", "prompt_logprobs") and "token" not in value:
            return {"<token>": value_shape(next(iter(value.values()), None), made_up=True)}
        return {
            name: value_shape(each, name, made_up or key.endswith("logprobs"))
            for name, each in value.items()
        }
    if isinstance(value, list):
        plain = key == "tokens" and not made_up
        return runs([value_shape(each, "" if plain else key, made_up) for each in value])
    if isinstance(value, str) and key == "message" and "validation error" in value:
        return "<validation error>"
    if value is None or isinstance(value, bool):
        return value
    if key in ("stop_reason", "sequence_number") and isinstance(value, int):
        return "<int>"
    if value == "":
        return ""
    if key in MADE_UP or key in CLOCKS or isinstance(value, float):
        return f"<{'number' if isinstance(value, int | float) else type(value).__name__}>"
    return without_chance(value) if isinstance(value, str) else value


def without_chance(text: str) -> str:
    """Random ids as their length, and ports without their number."""
    return PORT.sub(":<port>", HEX.sub(lambda match: f"<{len(match[0])} hex>", text))


def runs(shapes: list[Shape]) -> list[Shape]:
    """Equal neighbours once, unless they are numbers."""
    return [
        shape
        for place, shape in enumerate(shapes)
        if not place or shape != shapes[place - 1] or isinstance(shape, int)
    ]


def stream_shape(text: str) -> list[Shape]:
    """The events of a stream; those of several choices one choice after the other."""
    events = [event_shape(part) for part in text.split("\n\n") if part]
    opening = [each for each in events if is_opening(each)]
    others = [each for each in events if not is_opening(each)]
    return runs(opening + sorted(others, key=choice_index))


def event_shape(part: str) -> Shape:
    fields = dict(line.split(": ", 1) for line in part.splitlines())
    data = fields.pop("data", None)
    if data is None or not data.startswith("{"):
        return {**fields, "data": data}
    shape = value_shape(json.loads(data))
    if shape.get("choices") and shape.get("usage"):
        # So far, which depends on how many tokens came at once.
        shape["usage"] |= dict.fromkeys(("completion_tokens", "total_tokens"), "<number>")
    return {**fields, "data": shape}


def is_opening(event: Shape) -> bool:
    return any("role" in choice.get("delta", {}) for choice in choices(event))


def choice_index(event: Shape) -> int:
    return next((choice["index"] for choice in choices(event)), 1_000)


def choices(event: Shape) -> list[Shape]:
    data = event["data"]
    return data.get("choices", []) if isinstance(data, dict) else []


def metrics_shape(text: str) -> dict[str, Shape]:
    """The type of each family, and which labels its series carry."""
    families: dict[str, Shape] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            families[name] = {"type": kind}
        elif (match := SERIES.match(line)) and match["name"] in families:
            families[match["name"]]["labels"] = sorted(LABEL.findall(match["labels"] or ""))
    return {name: families[name] for name in sorted(families) if name.startswith("vllm:")}


def differences(real: Shape, simulated: Shape, path: str = "") -> Iterator[str]:
    """One line for each place where the two are not alike."""
    if isinstance(real, dict) and isinstance(simulated, dict):
        yield from key_differences(list(real), list(simulated), path)
        for key in real:
            if key in simulated:
                yield from differences(real[key], simulated[key], f"{path}.{key}".lstrip("."))
    elif isinstance(real, list) and isinstance(simulated, list) and nested(real, simulated):
        for place in range(max(len(real), len(simulated))):
            here = f"{path}[{place}]"
            if place >= len(real):
                yield f"{here} only simulated: {brief(simulated[place])}"
            elif place >= len(simulated):
                yield f"{here} only real: {brief(real[place])}"
            else:
                yield from differences(real[place], simulated[place], here)
    elif real != simulated or type(real) is not type(simulated):
        yield f"{path} real {brief(real)} simulated {brief(simulated)}"


def key_differences(real: list[str], simulated: list[str], path: str) -> Iterator[str]:
    place = f"{path}." if path else ""
    yield from (f"{place}{key} only real" for key in real if key not in simulated)
    yield from (f"{place}{key} only simulated" for key in simulated if key not in real)
    shared = [key for key in real if key in simulated]
    if shared != [key for key in simulated if key in real]:
        yield f"{place or 'the body'} has another order: {','.join(real)} / {','.join(simulated)}"


def nested(*lists: list[Shape]) -> bool:
    return any(isinstance(each, dict | list) for listed in lists for each in listed)


def brief(shape: Shape) -> str:
    return json.dumps(shape, ensure_ascii=False)
