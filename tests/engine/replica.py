"""One real vLLM replica on free ports, small enough to share two cores with the tests."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

from tests.engine.install import Engine

BLOCK_TOKENS = 32
BLOCKS = 256
CONTEXT_TOKENS = 4096
MODEL = "smollm2"
TOPIC = "kv-events"
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 40.0
SUPERVISOR = Path(__file__).with_name("supervisor.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONHASHSEED": "0",
}


class ReplicaError(Exception):
    """The replica did not start, or did not end; the message holds the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all held at once, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


class Replica:
    """A vLLM server with KV events and replay, restartable on the same ports.

    A context manager: leaving it ends every process of the replica. They also end when this
    process does, however it dies.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._log = folder / "replica.log"
        self.port, self.event_port, self.replay_port = free_ports(3)
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
        assert self._process is None, "already started"
        began_s = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *self._command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(self._folder / "cache")},
            )
        self._wait_healthy(began_s + START_DEADLINE_S)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """SIGKILL to every process of the replica at once, as a crash would."""
        self._end(b"kill\n")

    def stop(self) -> None:
        self._end(b"")

    def requests(self) -> tuple[int, int]:
        """How many requests the engine says are running and waiting."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return metric(text, "vllm:num_requests_running"), metric(text, "vllm:num_requests_waiting")

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def _command(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.event_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": TOPIC,
        }
        options = {
            "model": self._engine.model,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "bfloat16",
            "max-model-len": CONTEXT_TOKENS,
            "max-num-seqs": 8,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": BLOCKS,
            "prefix-caching-hash-algo": "sha256_cbor",
            "kv-events-config": json.dumps(events),
        }
        flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        module = "vllm.entrypoints.openai.api_server"
        return [str(self._engine.python), "-m", module, *named, *flags]

    def _wait_healthy(self, deadline_s: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise ReplicaError(f"the replica ended while starting:\n{self.log_tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        self.stop()
        raise ReplicaError(f"not healthy after {START_DEADLINE_S:.0f} s:\n{self.log_tail()}")

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
