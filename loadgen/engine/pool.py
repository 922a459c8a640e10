"""An LMCache server: one pool of KV cache that several replicas store to and load from."""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.engine.errors import ReplicaError
from loadgen.engine.install import Engine
from loadgen.engine.launch import ENVIRONMENT, free_ports, passed_environment
from loadgen.engine.process import EngineProcess

SHARED_MEMORY = Path("/dev/shm")
TRANSFERS = ("lmcache_driven", "engine_driven")
GIB = 1 << 30


@dataclass(frozen=True)
class PoolOptions:
    """`transfer` is who copies blocks.

    With lmcache_driven every replica publishes all that the pool stores and drops; with
    engine_driven copying is faster and the pool says nothing.
    """

    l1_size_gb: float = 1.0
    chunk_tokens: int = 32
    transfer: str = TRANSFERS[0]


class Pool:
    """A server on free ports. Its memory is a segment in /dev/shm that goes with it."""

    def __init__(
        self, engine: Engine, folder: Path, options: PoolOptions, remove: Path | None = None
    ) -> None:
        self.options = options
        self._port, self._http_port, metrics_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self._http_port}"
        self.endpoint = f"tcp://127.0.0.1:{self._port}"
        self.process = EngineProcess(
            "lmcache",
            [str(engine.with_lmcache()), "-m", "lmcache.cli.main", *self._arguments(metrics_port)],
            {**passed_environment(), **ENVIRONMENT, "LMCACHE_TRACK_USAGE": "false"},
            folder / "lmcache.log",
            f"{self.url}/healthcheck",
            remove,
        )

    def require_room(self) -> None:
        """Raises ReplicaError if /dev/shm cannot hold the pool: it would die on first use."""
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
        if free_bytes < self.options.l1_size_gb * GIB:
            raise ReplicaError(
                f"{SHARED_MEMORY} has {free_bytes / GIB:.1f} GiB free, the pool is to have"
                f" {self.options.l1_size_gb:g}"
            )

    def connector(self) -> str:
        """vLLM's --kv-transfer-config for a replica that uses this pool."""
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._port,
            "lmcache.mp.hash_algorithm": "sha256_cbor",
        }
        if self.options.transfer == "lmcache_driven":
            extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        return json.dumps(config)

    def _arguments(self, metrics_port: int) -> list[str]:
        options: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-host": "127.0.0.1",
            "http-port": self._http_port,
            "prometheus-port": metrics_port,
            "chunk-size": self.options.chunk_tokens,
            "l1-size-gb": self.options.l1_size_gb,
            "eviction-policy": "LRU",
            # With vLLM's own hash over chunks of its block size, the pool's keys are block hashes.
            "hash-algorithm": "sha256_cbor",
            "supported-transfer-mode": "auto",
            "shm-name": f"kvroute_{secrets.token_hex(4)}",
        }
        return ["server", *(part for k, v in options.items() for part in (f"--{k}", str(v)))]
