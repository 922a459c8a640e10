"""A gateway and simulated replicas, each a process that can be killed, stopped and brought back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.chaos.client import get_text
from tests.whole import Process, start_gateway, start_replicas, tokenizer_options

LOADS = ("kvroute_running_requests", "kvroute_queued_prefill_tokens")


class OneReplica:
    """A simulated replica in a process of its own; it keeps its port over its lives."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self.process, (self.url,) = start_replicas(1, *options)

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    def kill(self) -> None:
        self.process.kill()

    def signal(self, number: int) -> None:
        os.kill(self.process.popen.pid, number)

    async def restart(self) -> float:
        """Bring it back; returns when it was ready, by `time.monotonic`."""
        port = self.url.rsplit(":", 1)[1]
        self.process, _ = await asyncio.to_thread(start_replicas, 1, *self._options, "--port", port)
        return time.monotonic()

    def end(self) -> None:
        if self.process.popen.poll() is None:
            self.signal(signal.SIGCONT)
        self.process.end()


class ChaosFleet:
    """Replicas and the gateway before them."""

    def __init__(self, replicas: list[OneReplica], *options: str) -> None:
        self.replicas = replicas
        self._options = options
        self.process, self.url = self._started(*options)

    def _started(self, *options: str) -> tuple[Process, str]:
        return start_gateway([each.url for each in self.replicas], *options)

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    async def restart_gateway(self) -> None:
        port = self.url.rsplit(":", 1)[1]
        self.process, self.url = await asyncio.to_thread(
            self._started, *self._options, "--port", port
        )

    async def ready(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(await get_text(self.url, "/readyz"))
        return content

    async def metric(self, name: str) -> dict[str, float]:
        """Values of one metric by their labels as they stand in the text."""
        text = await get_text(self.url, "/metrics")
        found = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}

    async def until(self, what: str, met: Callable[[], Any], timeout_s: float = 20.0) -> float:
        """Seconds until `await met()` is true; other processes give no event to wait for."""
        started_s = time.monotonic()
        while not await met():
            if time.monotonic() > started_s + timeout_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}; {await self.ready()}")
            await asyncio.sleep(0.02)
        return time.monotonic() - started_s

    async def becomes_idle(self, timeout_s: float = 5.0) -> None:
        """Load counters return to zero: nothing leaks and nothing hangs."""

        async def idle() -> bool:
            return not any([any((await self.metric(name)).values()) for name in LOADS])

        await self.until("no load is held", idle, timeout_s)

    async def all_up(self, timeout_s: float = 20.0) -> None:
        async def up() -> bool:
            return all(each["healthy"] for each in (await self.ready())["replicas"].values())

        await self.until("every replica is healthy", up, timeout_s)

    async def index_current(self, timeout_s: float = 20.0) -> None:
        async def current() -> bool:
            ready = await self.ready()
            trusts = {each["trust"] for each in ready["replicas"].values()}
            return bool(ready["index"] == "available" and trusts == {"exact"})

        await self.until("the index is available and exact", current, timeout_s)


@asynccontextmanager
async def chaos_fleet(
    count: int, tmp_path: Path, *, replica: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[ChaosFleet]:
    """`settings` of the gateway go through a file, as most of them have no flag."""
    config = tmp_path / "kvroute.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    replicas = await asyncio.gather(
        *(asyncio.to_thread(OneReplica, *replica) for _ in range(count))
    )
    try:
        fleet = ChaosFleet(
            replicas, "--config", str(config), "--log-level", "error", *tokenizer_options()
        )
        try:
            await fleet.all_up()
            yield fleet
        finally:
            fleet.process.end()
    finally:
        for each in replicas:
            each.end()
