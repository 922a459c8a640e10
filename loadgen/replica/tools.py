"""Replies that have to be JSON: arguments of a tool, and what a response format asks for."""

from __future__ import annotations

from typing import Any

import orjson

from loadgen.replica.requests import ChatRequest

_DEEPEST = 16
_SIMPLE: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "null": None}
_TEXT = "cache"


def forced_text(request: ChatRequest) -> str | None:
    """The JSON text that the reply must be, None where it may be anything."""
    tool = request.forced_tool()
    if tool is not None:
        return orjson.dumps(example(_parameters(request, tool))).decode()
    wanted = request.response_format
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_object":
        return orjson.dumps({"answer": _TEXT}).decode()
    if wanted.get("type") == "json_schema":
        return orjson.dumps(example((wanted.get("json_schema") or {}).get("schema"))).decode()
    return None


def example(schema: Any, depth: int = 0) -> Any:
    """A value that fits a JSON schema of the usual kinds; {} for what is not understood."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return {}
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "string":
        return _TEXT[: schema.get("maxLength", len(_TEXT))].ljust(schema.get("minLength", 0), "e")
    if kind == "array":
        return [example(schema.get("items"), depth + 1)] * schema.get("minItems", 0)
    if isinstance(kind, str) and kind in _SIMPLE:
        return _SIMPLE[kind]
    fields = schema.get("properties") or {}
    return {name: example(each, depth + 1) for name, each in fields.items()}


def _parameters(request: ChatRequest, name: str) -> Any:
    for tool in request.tools or ():
        function = tool.get("function") or {}
        if function.get("name") == name:
            return function.get("parameters")
    return None
