import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx
import openai
import pytest

from loadgen.replica.model import EngineModel
from loadgen.replica.server import Fleet, FleetConfig, Language, load_language
from loadgen.tokenizer import default_folder

# Fast enough not to be felt, slow enough that steps have an order in time.
QUICK = EngineModel(
    blocks=512, prefill_c_s=0.0, prefill_a_s=1e-6, prefill_b_s=0.0, decode_step_s=0.001,
    decode_per_request_s=0.0,
)  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; for what no event tells."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


StartFleet = Callable[..., Awaitable[Fleet]]


@pytest.fixture(scope="session")
def language() -> Language:
    return load_language(default_folder())


@pytest.fixture
async def start_fleet(language: Language) -> AsyncIterator[StartFleet]:
    """Starts fleets that end with the test; keywords change the config or the engine model."""
    async with AsyncExitStack() as stack:

        async def start(**changes: object) -> Fleet:
            engine_fields = {
                name: changes.pop(name) for name in tuple(changes) if name in QUICK.__slots__
            }
            config = FleetConfig(engine=replace(QUICK, **engine_fields), **changes)
            return await stack.enter_async_context(Fleet(config, language))

        yield start


@pytest.fixture
async def fleet(start_fleet: StartFleet) -> Fleet:
    return await start_fleet()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url, timeout=10) as client:
        yield client


@pytest.fixture
async def sdk(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{fleet.replicas[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
