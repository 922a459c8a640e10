"""A simulated replica beside the real one, with its model's name, tokenizer and block size."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.replica import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, MODEL, TOPIC

START_S = 60.0


@dataclass(frozen=True)
class Side:
    """One of the two: where it answers and where it publishes."""

    url: str
    events: str
    replay: str


@contextmanager
def simulated_replica(tokenizer: Path, **more: Any) -> Iterator[Side]:
    """A process that ends with the context, or with this process; `more` are further options."""
    options: dict[str, Any] = {
        "model": MODEL,
        "tokenizer": tokenizer,
        "max-model-len": CONTEXT_TOKENS,
        "block-size": BLOCK_TOKENS,
        # vLLM keeps one block, the null block, for itself.
        "blocks": BLOCKS - 1,
        "max-num-seqs": 8,
        "topic": TOPIC,
        **more,
    }
    command = [sys.executable, "-m", "loadgen.replica", "--exit-on-stdin-eof"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        assert readable, "the simulated replica does not start"
        (described,) = json.loads(process.stdout.readline())["replicas"]
        yield Side(described["url"], described["kv_events"][0], described["replay"][0])
    finally:
        process.communicate(timeout=START_S)
