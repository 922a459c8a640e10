"""The `kvroute` command."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import typer

from router.config import load_settings
from router.errors import ConfigError
from router.explain_command import EPILOG, explain

COMMANDS_GROUP = "kvroute.commands"


app = typer.Typer(
    name="kvroute",
    help="OpenAI-compatible gateway that sends each request to the replica holding its prefix.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

SERVE_EPILOG = """**Examples**

`kvroute serve --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000`

`kvroute serve --config kvroute.yaml --policy least_load`

`KVROUTE_REDIS_URL=redis://10.0.0.9:6379 kvroute serve --replica http://10.0.0.7:8000`
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {version('kvroute')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Subcommands are listed below."""


@app.command(epilog=SERVE_EPILOG)
def serve(
    replica: Annotated[
        list[str] | None, typer.Option(help="Base URL of a replica; repeat for each.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; flags and KVROUTE_* win over it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="cost, round_robin, least_load, prefix_only or random."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json and chat template; else a replica is asked."),
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="Redis or Valkey URL; without it a private one is started.")
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log/--no-access-log", help="One JSON line a request.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    exit_on_stdin_eof: Annotated[
        bool, typer.Option(help="End when standard input closes, as when the parent dies.")
    ] = False,
) -> None:
    """Serve until SIGTERM or SIGINT; running requests are let finish, a second signal cuts them."""
    from router.server import run  # the web stack takes half a second that --help need not wait

    try:
        settings = load_settings(
            config,
            replicas=[{"url": url} for url in replica] if replica else None,
            host=host,
            port=port,
            policy=policy,
            tokenizer=tokenizer,
            redis_url=redis,
            access_log=access_log,
            log_level=log_level,
        )
        in_order = run(settings, exit_on_stdin_eof=exit_on_stdin_eof)
    except ConfigError as error:
        typer.echo(f"kvroute: {error}", err=True)
        raise typer.Exit(2) from None
    if not in_order:
        raise typer.Exit(1)


app.command("explain", epilog=EPILOG)(explain)


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if _wanted(arguments) in (None, "doctor"):
        _add_doctor()
    _add_commands(arguments)
    app()


def _wanted(arguments: list[str]) -> str | None:
    """The subcommand that is asked for, if any."""
    return next((each for each in arguments if not each.startswith("-")), None)


def _add_doctor() -> None:
    """Its parts take half a second to load, which nothing else need wait for."""
    from router.doctor.command import EPILOG, doctor

    app.command(epilog=EPILOG)(doctor)


def _add_commands(arguments: list[str]) -> None:
    """Commands of packages that the gateway itself must not import, loaded only when asked for."""
    wanted = _wanted(arguments)
    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda each: each.name):
        if wanted in (None, entry.name):
            command = entry.load()
            app.command(entry.name, epilog=getattr(command, "epilog", None))(command)


if __name__ == "__main__":
    main()
