"""Simulated replicas in this process, set up well or badly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from loadgen.replica.model import EngineModel
from loadgen.replica.server import Fleet, FleetConfig, Language, load_language
from loadgen.replica.setup import Setup
from loadgen.replica.wire import EventEncoding
from loadgen.tokenizer import default_folder

QUICK = EngineModel(
    blocks=512, prefill_c_s=0.0, prefill_a_s=1e-6, prefill_b_s=0.0, decode_step_s=0.001,
    decode_per_request_s=0.0,
)  # fmt: skip
FOLDER = default_folder()

Start = Callable[..., Awaitable[Fleet]]


def language() -> Language:
    return load_language(FOLDER)


@asynccontextmanager
async def starting(spoken: Language) -> AsyncIterator[Start]:
    """Starts simulated replicas; keywords change their config, their engine or their set-up."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> Fleet:
            engine = {name: changes.pop(name) for name in (*changes,) if name in QUICK.__slots__}
            setup = {
                name: changes.pop(name)
                for name in (*changes,)
                if name in Setup.__slots__ and not isinstance(changes[name], EventEncoding)
            }
            speaks = None if "tokenizer" in changes else spoken
            config = FleetConfig(engine=replace(QUICK, **engine), setup=Setup(**setup), **changes)
            return await stack.enter_async_context(Fleet(config, speaks))

        yield start


def declared(fleet: Fleet, **changes: Any) -> dict[str, Any]:
    """A fleet's first replica as settings name it with its publishers."""
    replica = fleet.replicas[0]
    described = replica.describe()
    events = [
        {"rank": rank, "endpoint": endpoint, "replay_endpoint": replay, **changes}
        for rank, (endpoint, replay) in enumerate(
            zip(described["kv_events"], described["replay"], strict=True)
        )
    ]
    return {"url": replica.url, "kv_events": events}
