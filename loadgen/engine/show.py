"""What runs, as a table for people."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from loadgen.engine.state import default_state


def table(about: dict[str, Any]) -> str:
    """Where everything is, how to put a gateway before it, and when it ends."""
    rows = [("replica", "core", "url", "events", "replay"), *map(_row, about["replicas"])]
    if about["pool"]:
        pool = about["pool"]
        rows.append(
            ("lmcache" + _health(pool), "-", pool["url"], pool["endpoint"], pool["transfer"])
        )
    if not about["ready"]:
        rows.append(("(starting)",))
    return "\n".join([*_aligned(rows), "", *_hints(about)])


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        replica["name"] + _health(replica),
        str(replica["core"]),
        replica["url"],
        replica["events"],
        replica["replay"],
    )


def _health(part: dict[str, Any]) -> str:
    return "" if part.get("healthy", True) else " (down)"


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    columns = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def _hints(about: dict[str, Any]) -> list[str]:
    replicas = " ".join(f"--replica {replica['url']}" for replica in about["replicas"])
    left_min = max(0.0, (about["ends_at"] or time.time()) - time.time()) / 60
    latest = f", at the latest in {left_min:.0f} min" if about["ready"] else ""
    parent = f", or with process {about['parent']}" if about["parent"] else ""
    state = "" if about["state"] == str(default_state().path) else f" --state {about['state']}"
    return [
        f"gateway:  kvroute serve {replicas} --tokenizer {about['tokenizer']}",
        f"model:    {about['model']}; logs: {about['logs']}",
        f"ends:     with `scripts/engine down{state}`{parent}{latest}",
    ]
