"""The experiment: the same traffic under each policy, every time on a fleet with empty caches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loadgen.client import Client, Deadlines
from loadgen.demo.fleet import Fleet, running_fleet
from loadgen.demo.oracle import oracle
from loadgen.demo.plan import Plan, plan
from loadgen.demo.settings import (
    BLOCK_TOKENS,
    MODEL_NAME,
    DemoSettings,
    engine_model,
    mooncake_settings,
    multiturn_settings,
)
from loadgen.demo.text import ModelText, block_hashes
from loadgen.errors import FleetError
from loadgen.outcome import Outcome
from loadgen.replica.model import EngineModel
from loadgen.run import Run, run_workload
from loadgen.stats import Reuse, Summary, reuse, summarise
from loadgen.tokenizer import default_folder
from loadgen.workload import Chat, Workload, mooncake, multiturn, read_trace


class Watcher(Protocol):
    """Is told how the experiment goes."""

    def starting(self, policy: str) -> None: ...
    def sending(self, policy: str, requests: int) -> None: ...
    def answered(self, outcome: Outcome) -> None: ...
    def finished(self, policy: str, row: Summary) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known before a process starts."""

    settings: DemoSettings
    workload: Workload
    plan: Plan
    model: EngineModel
    tokenizer: Path
    bound: Summary

    @property
    def working_set_over_cache(self) -> float:
        """Distinct blocks of the workload over the blocks that one replica holds."""
        return self.plan.distinct_blocks / self.model.blocks


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy's row, and whether the client kept to the schedule."""

    row: Summary
    duration_s: float
    lag_p99_s: float
    valid: bool
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent under each policy, and for how long at most. `fields` go into every body."""

    workload: Workload
    policies: tuple[str, ...]
    replicas: int
    model: str
    deadline_s: float
    deadlines: Deadlines | None = None
    fields: Mapping[str, Any] | None = None


Stage = Callable[[str], AbstractAsyncContextManager[Fleet]]
"""A fleet with empty caches and a gateway before it that runs the named policy."""
Keep = Callable[[dict[str, "Measured"], Fleet], Awaitable[None]]


def prepare(settings: DemoSettings) -> Prepared:
    """Generates the workload and plays the oracle. Raises WorkloadError."""
    folder = default_folder()
    workload = make_workload(settings, folder)
    planned = plan(workload, ModelText(folder), lambda ids: block_hashes(ids, BLOCK_TOKENS))
    model = engine_model(planned, settings)
    bound = summarise(
        oracle(planned, model, settings.replicas, seed=settings.seed), settings.replicas
    )
    return Prepared(settings, workload, planned, model, folder, bound)


def make_workload(settings: DemoSettings, tokenizer_folder: Path) -> Workload:
    """The traffic that `settings` ask for."""
    if settings.trace is None:
        return multiturn(multiturn_settings(settings), settings.seed)
    from tokenizers import Tokenizer

    rows = read_trace(settings.trace, settings.requests)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    return mooncake(rows, mooncake_settings(rows, settings), tokenizer, settings.seed)


async def measure(
    prepared: Prepared, watcher: Watcher, keep: Keep | None = None
) -> dict[str, Measured]:
    """`run_policies` on simulated replicas, which are started afresh for each policy."""
    settings = prepared.settings

    def stage(policy: str) -> AbstractAsyncContextManager[Fleet]:
        return running_fleet(
            prepared.model,
            replicas=settings.replicas,
            policy=policy,
            model_name=MODEL_NAME,
            tokenizer=prepared.tokenizer,
        )

    traffic = Traffic(
        prepared.workload,
        settings.policies,
        settings.replicas,
        MODEL_NAME,
        settings.deadline_s,
    )
    return await run_policies(traffic, stage, watcher, keep)


async def run_policies(
    traffic: Traffic, stage: Stage, watcher: Watcher, keep: Keep | None = None
) -> dict[str, Measured]:
    """One row per policy, in order. `keep` is awaited while the last policy's fleet still serves.

    Raises FleetError when a process does not start or dies.
    """
    rows: dict[str, Measured] = {}
    for policy in traffic.policies:
        watcher.starting(policy)
        async with stage(policy) as fleet:
            watcher.sending(policy, traffic.workload.requests)
            run = await _send(fleet, traffic, watcher)
            row = summarise(run.outcomes, traffic.replicas)
            rows[policy] = Measured(
                row, run.duration_s, run.lag_p99_s, run.valid, reuse(run.outcomes)
            )
            watcher.finished(policy, row)
            if keep is not None and policy == traffic.policies[-1]:
                await keep(rows, fleet)
    return rows


async def _send(fleet: Fleet, traffic: Traffic, watcher: Watcher) -> Run:
    async with Client(
        fleet.url, traffic.model, deadlines=traffic.deadlines, fields=traffic.fields
    ) as client:
        await _warm_up(client, fleet)
        sending = asyncio.create_task(
            run_workload(
                traffic.workload,
                client,
                deadline_s=traffic.deadline_s,
                on_outcome=watcher.answered,
            )
        )
        death = asyncio.create_task(fleet.died())
        try:
            await asyncio.wait((sending, death), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await death
            return await sending
        finally:
            sending.cancel()
            death.cancel()
            await asyncio.gather(sending, death, return_exceptions=True)


async def _warm_up(client: Client, fleet: Fleet) -> None:
    """One request too short to be cached: what is loaded on first use is loaded now."""
    outcome = await client.send(Chat((("user", "hi"),), 1), Outcome(0, 0, 0.0))
    if outcome.error is not None:
        raise FleetError(
            f"the first request failed: {outcome.error} {outcome.detail}\n{fleet.last_words()}"
        )
