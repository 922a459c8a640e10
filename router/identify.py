"""Where a prompt's token ids come from: the request itself, a local tokenizer, or a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson

from cache_index.blocks import pack_tokens
from router.config import Settings
from router.metrics import Metrics
from router.placement import BYTES_PER_TOKEN_GUESS, Prompt
from router.prompt import Request, given_tokens, local_tokens, tokenize_call
from router.replicas import Replica
from router.templating import Limits
from router.tokenizing import ModelTokenizer
from router.upstream import Headers
from router.wire import header, read_answer

INLINE_BYTES = 64 << 10
"""Bodies up to this are tokenized at once: some ten milliseconds of new text at the most."""
INLINE_LIMITS = Limits(cpu_s=0.05, chars=4 * INLINE_BYTES)
"""Of a rendering that everybody else waits for."""
MAX_BODY_BYTES = 8 << 20
MAX_MESSAGES = 10_000
"""Beyond these a prompt is placed on load alone: no engine takes one of that size, and even to hash
token ids that are given would hold everybody up."""
THREADS = 2
MAX_REMOTE_CALLS = 64
"""Tokenize calls under way at once; a request past that is placed on load alone."""


def load_tokenizers(settings: Settings) -> dict[str, ModelTokenizer]:
    """Tokenizers by model name; "" is for every other model. Raises ConfigError."""
    folders: dict[str, Path] = dict(settings.tokenizers)
    if settings.tokenizer is not None:
        folders[""] = settings.tokenizer
    return {model: ModelTokenizer.from_folder(folder) for model, folder in folders.items()}


class Identifier:
    """Requests to prompts with token ids."""

    def __init__(
        self, tokenizers: Mapping[str, ModelTokenizer], metrics: Metrics, *, timeout_s: float
    ) -> None:
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(trust_env=False)
        self._under_way = 0
        self._busy_threads = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._turn = 0

    async def close(self) -> None:
        """Close the connections to replicas' tokenizers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    async def identify(
        self, request: Request, replicas: Sequence[Replica], headers: Headers, body_bytes: int
    ) -> Prompt:
        """The prompt with its token ids, or with an estimated length alone. Never raises."""
        base = replicas[0].models[request.model].base
        source, ids = await self._token_ids(request, base, replicas, headers, body_bytes)
        tokens = len(ids) // 4 if ids is not None else body_bytes // BYTES_PER_TOKEN_GUESS
        return Prompt(request.model, request.salt, ids, tokens, source)

    def count(self, prompt: Prompt) -> None:
        """Count the prompt of a request that is going to be sent."""
        self._metrics.prompts.add(1, prompt.source)
        self._metrics.prompt_tokens.add(prompt.tokens)

    async def _token_ids(
        self,
        request: Request,
        base: str,
        replicas: Sequence[Replica],
        headers: Headers,
        body_bytes: int,
    ) -> tuple[str, bytes | None]:
        if body_bytes > MAX_BODY_BYTES:
            return "none", None
        given = given_tokens(request)
        if given is not None:
            return "given", given
        tokenizer = self._tokenizers.get(base) or self._tokenizers.get("")
        if tokenizer is not None:
            ids = await self._local(request, tokenizer, body_bytes)
            return ("none" if ids is None else "local"), ids
        call = tokenize_call(request)
        if call is None:
            return "none", None
        self._turn += 1
        replica = replicas[self._turn % len(replicas)]
        ids = await self._ask(replica, call, headers)
        return ("none" if ids is None else "replica"), ids

    async def _local(
        self, request: Request, tokenizer: ModelTokenizer, body_bytes: int
    ) -> bytes | None:
        """Token ids by our own tokenizer: a long prompt in a thread, and within the deadline."""
        if body_bytes <= INLINE_BYTES:
            return local_tokens(request, tokenizer, INLINE_LIMITS)
        messages = request.fields.get("messages")
        many = isinstance(messages, list) and len(messages) > MAX_MESSAGES
        if many or self._busy_threads >= THREADS:
            return None
        self._busy_threads += 1
        loop = asyncio.get_running_loop()
        # A thread cannot be cancelled: it ends by itself soon after nobody waits for it any more.
        limits = Limits(self._timeout_s)
        work = loop.run_in_executor(self._threads, local_tokens, request, tokenizer, limits)
        work.add_done_callback(self._thread_free)
        done, _ = await asyncio.wait({work}, timeout=self._timeout_s)
        return work.result() if done else None

    def _thread_free(self, work: asyncio.Future[bytes | None]) -> None:
        self._busy_threads -= 1
        if not work.cancelled():
            work.exception()  # looked at, also when nobody waits any more

    async def _ask(self, replica: Replica, call: dict[str, Any], headers: Headers) -> bytes | None:
        if self._under_way >= MAX_REMOTE_CALLS:
            return None
        self._under_way += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._tokenize(replica, call, headers)
        except (TimeoutError, httpx.HTTPError, ValueError, TypeError, KeyError, OverflowError):
            return None
        finally:
            self._under_way -= 1

    async def _tokenize(self, replica: Replica, call: dict[str, Any], headers: Headers) -> bytes:
        sent = {"content-type": "application/json"}
        authorization = header(headers, b"authorization") or replica.authorization
        if authorization is not None:
            sent["authorization"] = authorization.decode("latin-1")
        url = f"{replica.url}/tokenize"
        async with self._client.stream(
            "POST", url, content=orjson.dumps(call), headers=sent
        ) as answer:
            answer.raise_for_status()
            content = await read_answer(answer)
        return pack_tokens(orjson.loads(content)["tokens"])
