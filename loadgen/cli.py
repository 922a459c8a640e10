"""The `loadgen` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

EPILOG = """**Examples**

`loadgen replica --replicas 4 --port 8100` serves four simulated vLLM replicas on ports 8100 to 8103

`loadgen replica --blocks 2000 --prefill-a 0.00025` with a cache of 2,000 blocks, 4,000 tokens/s

`loadgen calibrate http://127.0.0.1:8000 --quick --out c.json` measures a replica; then
`loadgen replica --calibration c.json` is as fast

`kvroute demo` compares routing policies on such replicas and prints a table
"""

# Arguments are the subcommand's own to parse, --help included.
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="loadgen",
    help="Experiments around kvroute: simulated vLLM replicas, workloads, measurements.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"loadgen {version('kvroute')}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Subcommands are listed below."""


@app.command(context_settings=_FORWARD)
def replica(context: typer.Context) -> None:
    """Serve simulated vLLM replicas: HTTP, prefix cache, batching in real time, KV events."""
    from loadgen.replica.command import replica as serve  # loads the engine; --help need not wait

    command = typer.Typer(add_completion=False)
    command.command()(serve)
    command(args=context.args, prog_name="loadgen replica")


@app.command(context_settings=_FORWARD)
def calibrate(context: typer.Context) -> None:
    """Measure a replica, so that `loadgen replica --calibration` takes the same times."""
    from loadgen.calibrate.command import calibrate as measure

    command = typer.Typer(add_completion=False)
    command.command()(measure)
    command(args=context.args, prog_name="loadgen calibrate")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
