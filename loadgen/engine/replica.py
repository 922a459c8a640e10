"""One real vLLM replica on free ports, small enough to share two cores with other work."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import TracebackType

from loadgen.engine.install import Engine
from loadgen.engine.launch import (
    ReplicaOptions,
    ReplicaPorts,
    free_ports,
    replica_command,
    replica_environment,
)
from loadgen.engine.process import EngineProcess, fetch

START_DEADLINE_S = 240.0


class Replica:
    """A vLLM server with KV events and replay, restartable on the same ports.

    A context manager: leaving it ends every process of the replica. They also end when this
    process does, however it dies.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        options: ReplicaOptions | None = None,
        name: str = "replica",
        remove: Path | None = None,
    ) -> None:
        self.name = name
        self.options = options or ReplicaOptions()
        ports = ReplicaPorts(*free_ports(3))
        self.port, self.event_port, self.replay_port = ports.http, ports.events, ports.replay
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_folder = engine.model
        environment = replica_environment(self.options)
        self.process = EngineProcess(
            name,
            replica_command(engine, ports, self.options),
            {**environment, "VLLM_CACHE_ROOT": str(folder / "cache")},
            folder / f"{name}.log",
            f"{self.url}/health",
            remove,
        )

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start and wait until healthy; returns how long that took in seconds."""
        began_s = time.monotonic()
        self.process.spawn()
        self.process.wait_healthy(began_s + START_DEADLINE_S)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """SIGKILL to every process of the replica at once, as a crash would."""
        self.process.end(b"kill\n")

    def stop(self) -> None:
        """End every process of the replica, gently at first. Idempotent."""
        self.process.end()

    def requests(self) -> tuple[int, int]:
        """How many requests the engine says are running and waiting."""
        text = fetch(f"{self.url}/metrics", 10).decode()
        return metric(text, "vllm:num_requests_running"), metric(text, "vllm:num_requests_waiting")

    def log_tail(self) -> str:
        return self.process.log_tail()


def metric(text: str, name: str) -> int:
    """The sum over a metric's series in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return int(sum(map(float, values)))
