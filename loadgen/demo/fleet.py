"""Simulated replicas and a gateway in front of them, as processes that end with this one.

Each process runs under a lifeline: however this process ends, kill -9 included, they are ended and
what they left in the file system is removed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from loadgen.demo.child import START_DEADLINE_S, Child, Member
from loadgen.errors import ProcessDied, StartError
from loadgen.replica.model import EngineModel

_POLL_S = 0.05
_LISTENING = re.compile(r"listening on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A gateway that serves, and the processes behind it."""

    url: str
    replica_urls: tuple[str, ...]
    children: tuple[Member, ...]

    def last_words(self) -> str:
        """What the processes have printed last, where they have printed anything."""
        return "\n".join(child.output() for child in self.children if child.output())

    async def died(self) -> None:
        """Waits until a process has ended on its own, then raises ProcessDied."""
        waiting = [asyncio.ensure_future(child.wait()) for child in self.children]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waiting:
                wait.cancel()
        ended = [child for child in self.children if child.returncode is not None]
        raise ProcessDied("; ".join(child.obituary() for child in ended))


@asynccontextmanager
async def running_fleet(
    model: EngineModel,
    *,
    replicas: int,
    policy: str,
    model_name: str,
    tokenizer: Path,
    seed: int = 0,
) -> AsyncIterator[Fleet]:
    """Fresh replicas with empty caches and a gateway that sees all of them. Raises FleetError."""
    async with AsyncExitStack() as stack:
        engines = await Child.start(
            "loadgen replica", replica_command(model, replicas, model_name, tokenizer, seed)
        )
        stack.push_async_callback(engines.close)
        urls = _replica_urls(await engines.announcement())
        url, gateway = await stack.enter_async_context(running_gateway(urls, policy, tokenizer))
        yield Fleet(url, urls, (engines, gateway))


@asynccontextmanager
async def running_gateway(
    urls: tuple[str, ...], policy: str, tokenizer: Path
) -> AsyncIterator[tuple[str, Child]]:
    """A gateway that calls every replica healthy and trusts its events. Raises FleetError."""
    gateway = await Child.start("kvroute serve", gateway_command(urls, policy, tokenizer))
    try:
        url = _gateway_url(await gateway.announcement())
        await _until_ready(url, len(urls), gateway)
        yield url, gateway
    finally:
        await gateway.close()


def replica_command(
    model: EngineModel, replicas: int, model_name: str, tokenizer: Path, seed: int
) -> list[str]:
    """The command line of the simulated replicas; every value of `model` is spelt out."""
    options: dict[str, Any] = {
        "replicas": replicas,
        "host": "127.0.0.1",
        "port": 0,
        "model": model_name,
        "tokenizer": tokenizer,
        "block-size": model.block_size_tokens,
        "blocks": model.blocks,
        "prefill-c": model.prefill_c_s,
        "prefill-a": model.prefill_a_s,
        "prefill-b": model.prefill_b_s,
        "decode-step": model.decode_step_s,
        "decode-per-request": model.decode_per_request_s,
        "max-batched-tokens": model.max_batched_tokens,
        "max-num-seqs": model.max_num_seqs,
        "scheduling-policy": model.policy.value,
        "seed": seed,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "loadgen.replica", *arguments]


def gateway_command(replica_urls: Sequence[str], policy: str, tokenizer: Path) -> list[str]:
    """The gateway as its user would start it, on a free port."""
    replicas = [part for url in replica_urls for part in ("--replica", url)]
    options = ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]
    choice = ["--policy", policy, "--tokenizer", str(tokenizer)]
    return [sys.executable, "-m", "router.cli", "serve", *replicas, *options, *choice]


def _replica_urls(line: str) -> tuple[str, ...]:
    try:
        return tuple(replica["url"] for replica in orjson.loads(line)["replicas"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise StartError(f"loadgen replica announced {line!r}") from error


def _gateway_url(line: str) -> str:
    found = _LISTENING.search(line)
    if found is None:
        raise StartError(f"kvroute serve announced {line!r}")
    return found[1]


async def _until_ready(url: str, replicas: int, gateway: Child) -> None:
    """Until the gateway calls every replica healthy and trusts its events."""
    seen: Any = None
    try:
        async with (
            asyncio.timeout(START_DEADLINE_S),
            httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client,
        ):
            while gateway.returncode is None:
                with suppress(httpx.TransportError, orjson.JSONDecodeError):
                    seen = orjson.loads((await client.get("/readyz")).content)
                if _all_ready(seen, replicas):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise StartError(f"the gateway was not ready in time; last seen: {seen}") from None
    raise StartError(gateway.obituary())


def _all_ready(readiness: Any, replicas: int) -> bool:
    if not isinstance(readiness, dict) or readiness.get("status") != "ready":
        return False
    states = readiness.get("replicas", {}).values()
    ready = [state for state in states if state.get("healthy") and state.get("trust") == "exact"]
    return len(ready) == replicas
