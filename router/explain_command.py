"""`kvroute explain`. Only what the command line needs is imported before the command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from router.errors import CommandError, InvalidRequest

EPILOG = """**Examples**

`kvroute explain body.json` : where would this chat request go now, and why?

`kvroute explain - --path /v1/completions --url http://gateway:8080 < body.json`

`kvroute explain body.json --send` : send it, and compare what was predicted with what happened

`kvroute explain --request-id 4c1f...` : what happened to that one? The id is in every answer's
`x-kvroute-request-id`
"""


def explain(
    body: Annotated[
        str | None,
        typer.Argument(metavar="BODY.json", help="A request's JSON body; - is standard input."),
    ] = None,
    url: Annotated[str, typer.Option(help="The gateway's base URL.")] = "http://127.0.0.1:8080",
    path: Annotated[
        str, typer.Option(help="Path that the request would be sent to.")
    ] = "/v1/chat/completions",
    send: Annotated[
        bool, typer.Option("--send", help="Send it, and show what really happened.")
    ] = False,
    request_id: Annotated[
        str | None, typer.Option(help="Show the receipt of a request that was sent before.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    admin_token: Annotated[
        str | None,
        typer.Option(envvar="KVROUTE_ADMIN_TOKEN", help="The gateway's admin_token."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="Sent to the replicas, where they want one."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="With --send: seconds of silence that are waited for.")
    ] = 600.0,
) -> None:
    """Says where a running gateway would send a request, and why; or what became of one.

    Shows each candidate's matched tokens and predicted seconds, the choice and its reason. Nothing
    is sent without --send. The gateway needs an `admin_token`. Exit code 1: it was sent and not
    answered well; 2: there is nothing to show.
    """
    from router.questions import GatewayQuestions

    try:
        content, refusal = _body(body, request_id, send), ""
        with GatewayQuestions(url, admin_token, api_key) as gateway:
            if content is None:
                told = gateway.decision(request_id or "")
            elif send:
                told, refusal = gateway.send(content, path, timeout)
            else:
                told = gateway.explain(content, path)
        _print(told, as_json)
    except CommandError as error:
        typer.echo(f"kvroute explain: {error}", err=True)
        raise typer.Exit(2) from None
    if refusal:
        typer.echo(f"The answer was: {''.join(filter(str.isprintable, refusal))}", err=True)
    if send and (told["state"] != "answered" or told["outcome"]["status"] >= 400):
        raise typer.Exit(1)


def _body(body: str | None, request_id: str | None, send: bool) -> bytes | None:
    """The body, or None where a request id is asked about. Raises CommandError."""
    from router.prompt import load_object

    if (body is None) == (not request_id):
        raise CommandError("give a BODY.json (- for standard input), or --request-id ID")
    if body is None:
        if send:
            raise CommandError("--send needs a BODY.json; --request-id is about one sent before")
        return None
    try:
        content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
        load_object(content)
    except OSError as error:
        raise CommandError(f"{body}: {error.strerror}") from None
    except InvalidRequest as error:
        name = "standard input" if body == "-" else body
        raise CommandError(f"{name}: {error}") from None
    return content


def _print(told: dict[str, Any], as_json: bool) -> None:
    """Raises CommandError for what is no receipt."""
    import orjson
    from rich.console import Console

    from router.receipt_text import rendered

    if as_json:
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        return
    try:
        view = rendered(told)
    except (KeyError, TypeError) as error:
        message = f"the gateway's answer has another form ({error!r}); --json shows it as it is"
        raise CommandError(message) from None
    Console(highlight=False).print(view)
