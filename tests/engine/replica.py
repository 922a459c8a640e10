"""The real replica under the name that the tests use; it lives in loadgen.engine."""

from __future__ import annotations

from loadgen.engine.errors import ReplicaError
from loadgen.engine.launch import (
    BLOCK_TOKENS,
    BLOCKS,
    CONTEXT_TOKENS,
    ENVIRONMENT,
    MODEL,
    TOPIC,
    ReplicaOptions,
    free_ports,
)
from loadgen.engine.replica import START_DEADLINE_S, Replica, metric

__all__ = [
    "BLOCKS",
    "BLOCK_TOKENS",
    "CONTEXT_TOKENS",
    "ENVIRONMENT",
    "MODEL",
    "START_DEADLINE_S",
    "TOPIC",
    "Replica",
    "ReplicaError",
    "ReplicaOptions",
    "free_ports",
    "metric",
]
