"""Real replicas, each on a core of its own, with or without a pool that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Any

from loadgen.engine.errors import ReplicaError
from loadgen.engine.install import Engine
from loadgen.engine.launch import MODEL, TOPIC, ReplicaOptions, cores
from loadgen.engine.pool import Pool, PoolOptions
from loadgen.engine.process import EngineProcess
from loadgen.engine.replica import Replica

POOL_DEADLINE_S = 120.0
# All load their weights at once: two on two cores take one to two minutes on a busy machine.
START_DEADLINE_S = 360.0


@dataclass(frozen=True)
class FleetOptions:
    """`replica` is for all; each gets a core of its own as long as there are enough."""

    replicas: int = 2
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    pool: PoolOptions | None = None


class EngineFleet:
    """Started and ended together. A context manager: leaving it ends every process.

    `folder` is for logs; a `temporary` one is removed with the fleet.
    """

    def __init__(
        self, engine: Engine, folder: Path, options: FleetOptions, *, temporary: bool = False
    ) -> None:
        self.engine = engine
        remove = folder if temporary else None
        self.pool = Pool(engine, folder, options.pool, remove) if options.pool else None
        common = options.replica
        if self.pool is not None:
            engine = replace(engine, python=engine.with_lmcache())
            more = {**common.more, "kv-transfer-config": self.pool.connector()}
            common = replace(common, more=more)
        self.replicas = [
            Replica(engine, folder, replace(common, core=core), f"replica-{index}", remove)
            for index, core in enumerate(islice(cycle(cores()), options.replicas))
        ]

    def __enter__(self) -> EngineFleet:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def processes(self) -> list[EngineProcess]:
        """The pool's first, if there is one."""
        pool = [self.pool.process] if self.pool else []
        return [*pool, *(replica.process for replica in self.replicas)]

    def start(
        self, pause: Callable[[float], None] = time.sleep, keep_open: Sequence[int] = ()
    ) -> None:
        """Start and wait until all are healthy; whatever `pause` raises ends the waiting.

        `keep_open` are file descriptors that the supervision of each process holds. Raises
        ReplicaError.
        """
        if self.pool is not None:
            self.pool.require_room()
            self.pool.process.spawn(keep_open)
            self.pool.process.wait_healthy(time.monotonic() + POOL_DEADLINE_S, pause)
        for replica in self.replicas:
            replica.process.spawn(keep_open)
        deadline_s = time.monotonic() + START_DEADLINE_S
        for replica in self.replicas:
            replica.process.wait_healthy(deadline_s, pause)

    def stop(self) -> None:
        """End all, gently at first. Idempotent. Raises ReplicaError once the rest has ended."""
        for process in self.processes:
            process.order_end()
        failed: ReplicaError | None = None
        for process in self.processes:
            try:
                process.end()
            except ReplicaError as error:
                failed = error
        if failed is not None:
            raise failed

    def kill(self) -> None:
        """SIGKILL to everything."""
        for process in self.processes:
            with suppress(ReplicaError):
                process.end(b"kill\n")

    def describe(self) -> dict[str, Any]:
        """What a user needs to use it, as plain values."""
        return {
            "model": MODEL,
            "tokenizer": str(self.engine.model),
            "replicas": [_describe_replica(replica) for replica in self.replicas],
            "pool": _describe_pool(self.pool) if self.pool else None,
        }


def _describe_replica(replica: Replica) -> dict[str, Any]:
    options = replica.options
    return {
        "name": replica.name,
        "url": replica.url,
        "events": f"tcp://127.0.0.1:{replica.event_port}",
        "replay": f"tcp://127.0.0.1:{replica.replay_port}",
        "topic": TOPIC,
        "core": options.core,
        "block_tokens": options.block_tokens,
        "blocks": options.blocks,
        "context_tokens": options.context_tokens,
        "dtype": options.dtype,
    }


def _describe_pool(pool: Pool) -> dict[str, Any]:
    return {
        "kind": "lmcache",
        "url": pool.url,
        "endpoint": pool.endpoint,
        "l1_size_gb": pool.options.l1_size_gb,
        "chunk_tokens": pool.options.chunk_tokens,
        "transfer": pool.options.transfer,
    }
