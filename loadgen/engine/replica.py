"""One real vLLM replica on free ports, small enough to share two cores with other work."""

from __future__ import annotations

import re
import subprocess
import time
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from urllib.request import ProxyHandler, build_opener

from loadgen.engine.errors import ReplicaError
from loadgen.engine.install import Engine
from loadgen.engine.launch import (
    ReplicaOptions,
    ReplicaPorts,
    free_ports,
    replica_command,
    replica_environment,
)
from loadgen.engine.supervisor import supervised

START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 40.0
_LOG_LINES = 30
_POLL_S = 0.25
# No proxy: everything here is on this machine.
_open = build_opener(ProxyHandler({})).open


class Replica:
    """A vLLM server with KV events and replay, restartable on the same ports.

    A context manager: leaving it ends every process of the replica. They also end when this
    process does, however it dies.
    """

    def __init__(self, engine: Engine, folder: Path, options: ReplicaOptions | None = None) -> None:
        self._engine = engine
        self._folder = folder
        self._options = options or ReplicaOptions()
        self._log = folder / "replica.log"
        self._ports = ReplicaPorts(*free_ports(3))
        self.port, self.event_port = self._ports.http, self._ports.events
        self.replay_port = self._ports.replay
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_folder = engine.model
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start and wait until healthy; returns how long that took in seconds."""
        began_s = time.monotonic()
        self.spawn()
        self.wait_healthy(began_s + START_DEADLINE_S)
        return time.monotonic() - began_s

    def spawn(self) -> None:
        """Start, and leave it to `wait_healthy` to see it serve."""
        assert self._process is None, "already started"
        environment = replica_environment(self._options)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                supervised(replica_command(self._engine, self._ports, self._options)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "VLLM_CACHE_ROOT": str(self._folder / "cache")},
            )

    def wait_healthy(self, deadline_s: float) -> None:
        """`deadline_s` is on time.monotonic()'s clock. Raises ReplicaError."""
        while time.monotonic() < deadline_s:
            if self.healthy():
                return
            time.sleep(_POLL_S)
        self.stop()
        raise ReplicaError(f"not healthy in time:\n{self.log_tail()}")

    def healthy(self) -> bool:
        """Whether it serves now; raises ReplicaError once it has ended by itself."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ReplicaError(f"the replica ended while starting:\n{self.log_tail()}")
        try:
            with _open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def kill(self) -> None:
        """SIGKILL to every process of the replica at once, as a crash would."""
        self._end(b"kill\n")

    def stop(self) -> None:
        """End every process of the replica, gently at first. Idempotent."""
        self._end(b"")

    def requests(self) -> tuple[int, int]:
        """How many requests the engine says are running and waiting."""
        with _open(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return metric(text, "vllm:num_requests_running"), metric(text, "vllm:num_requests_waiting")

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def _end(self, order: bytes) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(order, timeout=STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ReplicaError(f"the replica did not end:\n{self.log_tail()}") from None


def metric(text: str, name: str) -> int:
    """The sum over a metric's series in Prometheus text."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return int(sum(map(float, values)))
