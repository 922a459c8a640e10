"""The command line and the environment of a real vLLM replica that fits on one core."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

from loadgen.engine.errors import ReplicaError
from loadgen.engine.install import Engine

BLOCK_TOKENS = 32
BLOCKS = 256
CONTEXT_TOKENS = 4096
MODEL = "smollm2"
TOPIC = "kv-events"
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _PORT_TRIES = 15_000, 1000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONHASHSEED": "0",
}
# Of this process and not for another Python: what it finds there must not get into the engine.
_NOT_PASSED_ON = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


@dataclass(frozen=True)
class ReplicaOptions:
    """How a replica is started. `more` are further options of vLLM by name, without the dashes;
    `flags` further ones without a value, `without` those of ours that are left out.

    `blocks` times `block_tokens` must hold `context_tokens`, or vLLM does not start.
    """

    core: int = 0
    block_tokens: int = BLOCK_TOKENS
    blocks: int = BLOCKS
    context_tokens: int = CONTEXT_TOKENS
    dtype: str = "bfloat16"
    more: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReplicaPorts:
    """HTTP, published KV events, and their replay; all on 127.0.0.1."""

    http: int
    events: int
    replay: int


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all held at once, so that they differ.

    An engine binds some of them only when it has loaded, a minute later. So they are none of those
    that the kernel gives to whoever connects or asks for any port.
    """
    candidates = _candidates()
    with ExitStack() as held:
        return [_hold_one(candidates, held) for _ in range(count)]


def _hold_one(candidates: Iterator[int], held: ExitStack) -> int:
    for port in candidates:
        one = held.enter_context(socket.socket())
        with suppress(OSError):
            # On all addresses, because that is where events are published.
            one.bind(("", port))
            return int(one.getsockname()[1])
    raise ReplicaError("no free ports")


def _candidates() -> Iterator[int]:
    """Ports to try, in an order of its own for each process; 0 where nothing else is left."""
    try:
        given_from = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError):
        given_from = 0
    ports = range(_FIRST_PORT, given_from)
    yield from random.SystemRandom().sample(ports, min(len(ports), _PORT_TRIES))
    yield from repeat(0, _PORT_TRIES)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def replica_command(engine: Engine, ports: ReplicaPorts, options: ReplicaOptions) -> list[str]:
    """vLLM's API server with prefix caching, KV events and replay."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://*:{ports.replay}",
        "topic": TOPIC,
    }
    values: dict[str, Any] = {
        "model": engine.model,
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": ports.http,
        "dtype": options.dtype,
        "max-model-len": options.context_tokens,
        "max-num-seqs": 8,
        "block-size": options.block_tokens,
        "num-gpu-blocks-override": options.blocks,
        "prefix-caching-hash-algo": "sha256_cbor",
        "kv-events-config": json.dumps(events),
        **options.more,
    }
    flags = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details")
    kept = [f"--{each}" for each in (*flags, *options.flags) if each not in options.without]
    given = {name: value for name, value in values.items() if name not in options.without}
    named = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [str(engine.python), "-m", "vllm.entrypoints.openai.api_server", *named, *kept]


def replica_environment(options: ReplicaOptions) -> dict[str, str]:
    """That of a replica: this process's own, less what is not for it, and the engine's."""
    return {**passed_environment(), **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(options.core)}


def passed_environment() -> dict[str, str]:
    """This process's environment, less what is meant for its own Python."""
    return {name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON}
