"""Shows how the experiment goes: a bar in a terminal, a line per policy elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from loadgen.outcome import Outcome
from loadgen.stats import Summary


class ProgressView:
    """A `loadgen.demo.experiment.Watcher`. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._errors = 0
        self._tasks: dict[str, TaskID] = {}
        self._current: TaskID | None = None
        self._bars = Progress(
            TextColumn("{task.fields[policy]:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """No more drawing. Idempotent."""
        self._bars.stop()

    def starting(self, policy: str) -> None:
        state = "starting replicas and gateway"
        self._errors = 0
        self._current = self._bars.add_task("", total=None, policy=policy, state=state)
        self._tasks[policy] = self._current

    def sending(self, policy: str, requests: int) -> None:
        self._bars.update(self._tasks[policy], total=requests, state="")

    def answered(self, outcome: Outcome) -> None:
        assert self._current is not None
        self._errors += outcome.error is not None
        state = f"{self._errors} failed" if self._errors else ""
        self._bars.update(self._current, advance=1, state=state)

    def finished(self, policy: str, row: Summary) -> None:
        state = f"TTFT mean {row.ttft_mean_s * 1000:,.0f} ms, {row.cached_fraction:.0%} cached"
        self._bars.update(self._tasks[policy], state=state)
        if not self._console.is_terminal:
            self._console.print(f"{policy}: {row.requests} requests, {state}", highlight=False)
