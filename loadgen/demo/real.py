"""The demo on real vLLM replicas: they stay up, and are emptied before each policy's traffic."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadgen.client import Deadlines
from loadgen.demo.child import Member
from loadgen.demo.experiment import Keep, Measured, Traffic, Watcher, run_policies
from loadgen.demo.fleet import Fleet, running_gateway
from loadgen.demo.settings import POLICIES
from loadgen.engine.fleet import EngineFleet, FleetOptions
from loadgen.engine.install import Engine
from loadgen.engine.launch import MODEL, ReplicaOptions
from loadgen.engine.process import EngineProcess
from loadgen.errors import FleetError
from loadgen.workload import MultiturnSettings, Workload, multiturn

# Prompts of 300 to 900 tokens; a core prefills some hundreds a second. Both caches together hold
# about the working set, one alone does not.
ENGINE = ReplicaOptions(blocks=160, context_tokens=2048)
SESSIONS_PER_S_OF_RUN = 0.5
ARRIVAL_SHARE = 0.5
THINK_SHARE = 0.06
# Replies of one length whatever the model says, so that policies are compared on equal work.
FIELDS = {"ignore_eos": True}
DEADLINES = Deadlines(read_s=60.0, total_s=90.0)
SEEN_DEADLINE_S = 15.0
_POLL_S = 0.1
_SOURCE_BLOCKS = re.compile(r"^kvroute_source_blocks(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RealSettings:
    """`duration_s` is the length of the traffic of one policy, about."""

    seed: int = 1
    replicas: int = 2
    duration_s: float = 24.0
    policies: tuple[str, ...] = POLICIES

    @property
    def deadline_s(self) -> float:
        """For the traffic of one policy, so that three of them and the start take five minutes."""
        return 10.0 + 2 * self.duration_s


@dataclass(frozen=True, slots=True)
class Engines:
    """Real replicas that serve, and how long they took to."""

    fleet: EngineFleet
    start_s: float


def real_workload(settings: RealSettings) -> Workload:
    """Multi-turn chats over a few system prompts, small enough for a core per replica."""
    fleet = settings.replicas / 2
    chats = MultiturnSettings(
        sessions=max(2, round(SESSIONS_PER_S_OF_RUN * settings.duration_s * fleet)),
        arrival_window_s=ARRIVAL_SHARE * settings.duration_s,
        turns=(4, 5),
        think_mean_s=THINK_SHARE * settings.duration_s,
        system_prompts=3,
        system_chars=1100,
        user_chars=(300, 700),
        reply_tokens=(8, 12),
    )
    return multiturn(chats, settings.seed)


@contextmanager
def running_engines(settings: RealSettings, engine: Engine) -> Iterator[Engines]:
    """Healthy replicas that have each computed a prompt. Raises FleetError."""
    folder = Path(tempfile.mkdtemp(prefix="kvroute-demo-"))
    began_s = time.monotonic()
    try:
        options = FleetOptions(settings.replicas, ENGINE)
        with EngineFleet(engine, folder, options, temporary=True) as fleet:
            fleet.start()
            # What an engine loads on first use must not count against the first policy.
            urls = [replica.url for replica in fleet.replicas]
            asyncio.run(_ask_all(urls, "It was a bright cold day in April. " * 60))
            yield Engines(fleet, time.monotonic() - began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measure_real(
    settings: RealSettings,
    workload: Workload,
    engines: Engines,
    watcher: Watcher,
    keep: Keep | None = None,
) -> dict[str, Measured]:
    """`run_policies` on these engines."""

    fleet = engines.fleet
    urls = tuple(replica.url for replica in fleet.replicas)
    members = tuple(EngineMember(process) for process in fleet.processes)

    def stage(policy: str) -> AbstractAsyncContextManager[Fleet]:
        return emptied(urls, fleet.engine.model, members, policy)

    traffic = Traffic(
        workload,
        settings.policies,
        settings.replicas,
        MODEL,
        settings.deadline_s,
        DEADLINES,
        FIELDS,
    )
    return await run_policies(traffic, stage, watcher, keep)


@asynccontextmanager
async def emptied(
    urls: tuple[str, ...], tokenizer: Path, members: tuple[Member, ...], policy: str
) -> AsyncIterator[Fleet]:
    """The replicas with empty caches, and a fresh gateway that knows them to be empty."""
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        for url in urls:
            (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()
    # An engine announces the reset with its next batch of events. One token fills no block.
    await _ask_all(urls, "a")
    async with running_gateway(urls, policy, tokenizer) as (url, gateway):
        await _until_empty(url)
        yield Fleet(url, urls, (gateway, *members))


async def _ask_all(urls: Iterable[str], prompt: str) -> None:
    """One request to each replica at the same time, for its first token."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        asked = [client.post(f"{url}/v1/completions", json=body) for url in urls]
        for answer in await asyncio.gather(*asked):
            answer.raise_for_status()


async def _until_empty(url: str) -> None:
    """Until the gateway has taken in that no replica holds a block. Raises FleetError."""
    seen: list[float] = []
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(SEEN_DEADLINE_S),
            httpx.AsyncClient(timeout=5.0, trust_env=False) as client,
        ):
            while not seen or any(seen):
                metrics = (await client.get(f"{url}/metrics")).text
                seen = [float(blocks) for blocks in _SOURCE_BLOCKS.findall(metrics)]
                await asyncio.sleep(_POLL_S)
            return
    raise FleetError(f"the gateway did not see that the caches were emptied: {seen} blocks")


class EngineMember:
    """A process of the real engine as one of the demo's."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> None:
        if self._process.pid is None or self._process.ended:
            return
        over = asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def output(self) -> str:
        return self._process.log_tail()

    def obituary(self) -> str:
        return f"{self._process.name} ended with code {self.returncode}:\n{self.output()}"
