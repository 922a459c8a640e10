"""`kvroute demo --engine vllm`, after its options have been read."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path

import orjson
from rich.console import Console

from loadgen.demo import real_report
from loadgen.demo.command import end_on_sigterm, invite
from loadgen.demo.experiment import Measured
from loadgen.demo.fleet import Fleet
from loadgen.demo.progress import ProgressView
from loadgen.demo.real import Engines, RealSettings, measure_real, real_workload, running_engines
from loadgen.demo.report import warning
from loadgen.engine.install import engine_folder, find_engine
from loadgen.engine.launch import MODEL


def run_real(settings: RealSettings, json: Path | None, keep: bool) -> bool:
    """Runs and reports; whether a request failed. Raises LoadgenError."""
    engine = find_engine(engine_folder())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    run = _RealRun(settings, console, json)
    starting = f"Starting {settings.replicas} real vLLM replicas: a minute or two"
    if not console.is_terminal:
        console.print(starting)
    with console.status(starting) as status, running_engines(settings, engine) as engines:
        status.stop()
        measured = asyncio.run(run.measure(engines, keep))
    return any(one.row.errors for one in measured.values())


class _RealRun:
    def __init__(self, settings: RealSettings, console: Console, json: Path | None) -> None:
        self._settings = settings
        self._workload = real_workload(settings)
        self._console = console
        self._json = json
        self._began_s = time.monotonic()

    async def measure(self, engines: Engines, keep: bool) -> dict[str, Measured]:
        end_on_sigterm()
        with ProgressView(self._console) as view:

            async def stay(measured: dict[str, Measured], fleet: Fleet) -> None:
                view.close()
                self._report(engines, measured)
                invite(self._console, fleet, MODEL)
                # Ctrl-C is how this is meant to end.
                with suppress(asyncio.CancelledError):
                    await fleet.died()

            measured = await measure_real(
                self._settings, self._workload, engines, view, stay if keep else None
            )
        if not keep:
            self._report(engines, measured)
        return measured

    def _report(self, engines: Engines, measured: dict[str, Measured]) -> None:
        total_s = time.monotonic() - self._began_s
        found = real_report.Found(self._settings, self._workload, engines, measured, total_s)
        self._console.print(real_report.table(found))
        for sentence in real_report.sentences(found):
            self._console.print(sentence, highlight=False)
        late = warning(measured)
        if late is not None:
            self._console.print(late, style="bold red", highlight=False)
        if self._json is not None:
            text = orjson.dumps(real_report.as_json(found), option=orjson.OPT_INDENT_2)
            self._json.write_bytes(text + b"\n")
