"""What the demo found: a table, a sentence, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadgen.demo.experiment import Measured, Prepared
from loadgen.demo.settings import BASELINE
from loadgen.stats import Summary

ORACLE = "oracle"
CHOICE = "cost"
# A gap between baseline and oracle under this share of the baseline is within what network and
# gateway add to every measured row, so that no share of it can be said to be won.
MIN_GAP = 0.1
_NUMBERS = ("TTFT\nmean", "\np50", "\np99", "\ncached", "largest\nshare", "\nrequests", "\nerrors")


def table(prepared: Prepared, measured: Mapping[str, Measured]) -> Table:
    """One line per policy and one for the oracle."""
    grid = empty_table(_title(prepared), _NUMBERS)
    for policy, row in _rows(prepared, measured).items():
        grid.add_row(policy, *_cells(row, prepared.settings.replicas))
    return grid


def empty_table(title: str, numbers: Iterable[str]) -> Table:
    """A line per policy will fit into 80 columns, where a wrapped number is hard to read."""
    grid = Table(
        title=title,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    grid.add_column("\npolicy", no_wrap=True)
    for name in numbers:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _title(prepared: Prepared) -> str:
    return (
        f"{prepared.workload.name}: {prepared.workload.requests} requests,"
        f" {prepared.plan.prompt_tokens:,} prompt tokens, {prepared.settings.replicas} replicas,\n"
        f"working set {prepared.working_set_over_cache:.1f} times what one replica's cache holds"
    )


def _rows(prepared: Prepared, measured: Mapping[str, Measured]) -> dict[str, Summary]:
    return {name: one.row for name, one in measured.items()} | {ORACLE: prepared.bound}


def _cells(row: Summary, replicas: int) -> tuple[str, ...]:
    times = (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p99_s)
    return (
        *(f"{time_s * 1000:,.0f} ms" if isfinite(time_s) else "-" for time_s in times),
        f"{row.cached_fraction:.1%}",
        f"{row.hotspot / replicas:.1%}",
        str(row.requests),
        str(row.errors),
    )


def gap_recovered(baseline: Summary, choice: Summary, bound: Summary) -> float | None:
    """Share of what is possible over the baseline, by mean TTFT; None if that is under MIN_GAP.

    Not clipped: below 0 is worse than the baseline, above 1 better than the oracle.
    """
    gap_s = baseline.ttft_mean_s - bound.ttft_mean_s
    if not isfinite(gap_s) or gap_s < MIN_GAP * baseline.ttft_mean_s:
        return None
    won = (baseline.ttft_mean_s - choice.ttft_mean_s) / gap_s
    return won if isfinite(won) else None


def sentence(prepared: Prepared, measured: Mapping[str, Measured]) -> str:
    """What was gained, in numbers; names what failed where something did."""
    if (unfit := not_comparable(measured)) is not None:
        return unfit
    before, after = measured[BASELINE].row, measured[CHOICE].row
    text = (
        f"{times_compared(before, after)}"
        f" ({before.ttft_mean_s / after.ttft_mean_s:.1f} times as fast), reusing"
        f" {after.cached_fraction:.0%} of the prompt tokens instead of {before.cached_fraction:.0%}"
    )
    won = gap_recovered(before, after, prepared.bound)
    text += f": {won:.0%} of what the oracle gains." if won is not None else "."
    faster = {
        name: one.row.ttft_mean_s
        for name, one in measured.items()
        if name != CHOICE and one.row.ttft_mean_s < after.ttft_mean_s
    }
    if faster:
        name = min(faster, key=faster.__getitem__)
        text += f" Here {name} was faster still: {faster[name] * 1000:.0f} ms."
    return text


def not_comparable(measured: Mapping[str, Measured]) -> str | None:
    """Why nothing can be said of what is gained; None where it can."""
    failed = {name: one.row.errors for name, one in measured.items() if one.row.errors}
    if failed:
        listed = ", ".join(f"{count} under {policy}" for policy, count in failed.items())
        return f"Requests failed, so nothing is compared: {listed}."
    if not {BASELINE, CHOICE} <= measured.keys():
        return f"Run {BASELINE} and {CHOICE} together to see what is gained."
    return None


def times_compared(before: Summary, after: Summary) -> str:
    """First tokens under the baseline and under the choice; how a sentence begins."""
    return (
        f"{CHOICE} answers with the first token after {after.ttft_mean_s * 1000:.0f} ms on average"
        f" instead of {before.ttft_mean_s * 1000:.0f} ms under {BASELINE}"
    )


def warning(measured: Mapping[str, Measured]) -> str | None:
    """Says so when the client was too late for the run to mean anything."""
    late = [
        f"{policy} ({one.lag_p99_s * 1000:.0f} ms)"
        for policy, one in measured.items()
        if not one.valid
    ]
    if not late:
        return None
    return f"Invalid: requests were sent late (p99) under {', '.join(late)}; is the machine busy?"


def as_json(prepared: Prepared, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """The result as plain values; a number that does not exist is None."""
    policies = {policy: row_json(row) for policy, row in _rows(prepared, measured).items()}
    for policy, one in measured.items():
        policies[policy] |= {
            "duration_s": one.duration_s,
            "lag_p99_s": one.lag_p99_s,
            "valid": one.valid,
            "reuse": asdict(one.reuse),
        }
    won = None
    if {BASELINE, CHOICE} <= measured.keys():
        won = gap_recovered(measured[BASELINE].row, measured[CHOICE].row, prepared.bound)
    settings = asdict(prepared.settings)
    settings["trace"] = prepared.settings.trace.name if prepared.settings.trace else None
    return {
        "working_set_over_cache": prepared.working_set_over_cache,
        "policies": policies,
        "gap_recovered": won,
        "valid": all(one.valid for one in measured.values()),
        "workload": {
            "name": prepared.workload.name,
            "requests": prepared.workload.requests,
            "prompt_tokens": prepared.plan.prompt_tokens,
            "distinct_blocks": prepared.plan.distinct_blocks,
        },
        "settings": settings,
        "engine": asdict(prepared.model),
    }


def row_json(row: Summary) -> dict[str, Any]:
    """A row as plain values; NaN becomes None."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in asdict(row).items()
    }
