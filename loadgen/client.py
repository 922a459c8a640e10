"""One streaming request to an OpenAI-compatible server, measured.

The first token is the first chunk with text in it: the role chunk that opens a chat stream says
nothing about prefill and is not counted. Every wait has a deadline: connecting, each read, and the
request as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from loadgen.outcome import Outcome
from loadgen.sse import EventTooLong, SseDecoder
from loadgen.workload.model import Chat, Completion

REPLICA_HEADER = "x-kvroute-replica"
MATCHED_HEADER = "x-kvroute-matched-tokens"
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: to connect, between two reads, and for a whole request."""

    connect_s: float = 5.0
    read_s: float = 30.0
    total_s: float = 60.0


class Malformed(Exception):
    """The server's answer is not what the API promises."""


class StreamFailed(Exception):
    """The server reported an error inside a stream that had begun."""


class Client:
    """Keeps connections to one server. Use as an async context manager.

    `clock` gives the seconds that outcomes are in; it must be monotonic. `fields` go into every
    body.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        deadlines: Deadlines | None = None,
        max_connections: int = 1024,
        clock: Callable[[], float] = monotonic,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._fields = dict(fields or {})
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(self._deadlines.read_s, connect=self._deadlines.connect_s),
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            # The measured path must not depend on proxy settings of the environment.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def send(self, request: Chat | Completion, outcome: Outcome) -> Outcome:
        """Sends `request` and fills in `outcome`. A failure is recorded there, never raised."""
        outcome.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._deadlines.total_s):
                await self._stream(request, outcome)
        except (TimeoutError, httpx.TimeoutException) as error:
            _fail(outcome, "timeout", error)
        except httpx.ConnectError as error:
            _fail(outcome, "connect", error)
        except httpx.RemoteProtocolError as error:
            _fail(outcome, "truncated", error)
        except httpx.TransportError as error:
            _fail(outcome, "transport", error)
        except StreamFailed as error:
            _fail(outcome, "stream_error", error)
        except (Malformed, EventTooLong) as error:
            _fail(outcome, "malformed", error)
        outcome.done_s = self._clock()
        return outcome

    async def _stream(self, request: Chat | Completion, outcome: Outcome) -> None:
        path, body = encode(request, self._model, self._fields)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        async with self._http.stream("POST", path, content=body, headers=headers) as response:
            outcome.replica = response.headers.get(REPLICA_HEADER, "")
            matched = response.headers.get(MATCHED_HEADER, "")
            outcome.matched_tokens = int(matched) if matched.isdecimal() else None
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error, outcome.detail = f"http_{response.status_code}", text[:500]
                return
            decoder = SseDecoder()
            reader = _Reader(outcome)
            async for piece in response.aiter_raw():
                now_s = self._clock()
                for event in decoder.feed(piece):
                    reader.take(event, now_s)
            reader.close()


class _Reader:
    """Turns the events of one stream into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._text: list[str] = []
        self._last_s = 0.0
        self._done = False

    def take(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        chunk = _object(event)
        if "error" in chunk:
            raise StreamFailed(event.decode(errors="replace")[:500])
        self._usage(chunk.get("usage"))
        text = _text(chunk)
        if text:
            self._token(text, now_s)

    def close(self) -> None:
        """The stream has ended: decide whether the answer was whole."""
        self._outcome.reply = "".join(self._text)
        if not self._done:
            self._outcome.error = "truncated"
        elif not self._text:
            self._outcome.error = "empty"

    def _token(self, text: str, now_s: float) -> None:
        if self._text:
            self._outcome.gaps_s.append(now_s - self._last_s)
        else:
            self._outcome.first_token_s = now_s
        self._text.append(text)
        self._last_s = now_s

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._outcome.prompt_tokens = _count(usage.get("prompt_tokens"))
        self._outcome.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self._outcome.cached_tokens = _count(details.get("cached_tokens"))


def encode(
    request: Chat | Completion, model: str, fields: Mapping[str, Any] | None = None
) -> tuple[str, bytes]:
    """(path, body) of a streaming request that reports its usage at the end."""
    common = {
        **(fields or {}),
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if isinstance(request, Completion):
        return "/v1/completions", orjson.dumps(common | {"prompt": request.prompt})
    messages = [{"role": role, "content": content} for role, content in request.messages]
    return "/v1/chat/completions", orjson.dumps(common | {"messages": messages})


def _fail(outcome: Outcome, kind: str, error: Exception) -> None:
    outcome.error, outcome.detail = kind, f"{type(error).__name__}: {error}"[:500]


def _object(event: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"not JSON: {event[:200]!r}") from error
    if not isinstance(chunk, dict):
        raise Malformed(f"not an object: {event[:200]!r}")
    return chunk


def _text(chunk: dict[str, Any]) -> str:
    """The text of a chat or completion chunk, "" for a role, finish or usage chunk."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    delta = choices[0].get("delta")
    if not isinstance(delta, dict):
        text = choices[0].get("text")
        return text if isinstance(text, str) else ""
    parts = (delta.get(field) for field in _TEXT_FIELDS)
    return "".join(part for part in parts if isinstance(part, str))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
