"""litellm as a client: `litellm_client.py URL CASE` prints one JSON line for each thing seen.

In a process of its own, because litellm keeps sessions and settings in its module.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched on import

import litellm

litellm.telemetry = False
litellm.suppress_debug_info = True
URL, CASE = sys.argv[1:]
COMMON: dict[str, Any] = {
    "model": "openai/sim-model",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "Say something."}],
    "num_retries": 0,
    "max_retries": 0,
    "timeout": 20,
}


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def failure(work: Callable[[], object]) -> dict[str, Any]:
    try:
        work()
    except Exception as error:
        kinds = [each.__name__ for each in type(error).__mro__]
        status = getattr(error, "status_code", None)
        return {"name": kinds[0], "kinds": kinds, "status": status, "message": str(error)}
    return {"name": None}


def read(chunks: Any, told: bool = False) -> dict[str, Any]:
    pieces: list[str] = []
    for chunk in chunks:
        pieces += [each.delta.content or "" for each in chunk.choices]
        if told and len(pieces) == 3:
            say("begun")
    return {"text": "".join(pieces), "pieces": len(pieces)}


def chat() -> object:
    answer = litellm.completion(**COMMON, max_tokens=8)
    streamed = read(litellm.completion(**COMMON, max_tokens=8, stream=True))["text"]
    texts = [answer.choices[0].message.content, streamed, *asyncio.run(chat_async())]
    return {"texts": texts, "completion_tokens": answer.usage.completion_tokens}


async def chat_async() -> list[str]:
    answer = await litellm.acompletion(**COMMON, max_tokens=8)
    pieces = []
    async for chunk in await litellm.acompletion(**COMMON, max_tokens=8, stream=True):
        pieces += [each.delta.content or "" for each in chunk.choices]
    return [answer.choices[0].message.content, "".join(pieces)]


def errors() -> object:
    def ask(**fields: Any) -> dict[str, Any]:
        return failure(lambda: litellm.completion(**{**COMMON, **fields}))

    return {"unknown": ask(model="openai/nope"), "bad": ask(max_tokens=10**9)}


def cut() -> object:
    return failure(
        lambda: read(litellm.completion(**COMMON, max_tokens=4000, stream=True), told=True)
    )


CASES = {each.__name__: each for each in (chat, errors, cut)}

if __name__ == "__main__":
    say(CASES[CASE]())
