"""`kvroute doctor`: examines replicas once, shows what is wrong and how to mend it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import orjson
import typer
from rich.console import Console

from router.config import ReplicaConfig, Settings, load_settings
from router.discovery import dns_names, static_replicas, system_resolver
from router.doctor.facts import ReplicaFacts
from router.doctor.findings import findings
from router.doctor.gather import Examiner
from router.doctor.report import render
from router.doctor.verdict import Finding, Severity
from router.errors import ConfigError
from router.identify import load_tokenizers

LOOKUP_S = 5.0
AT_ONCE = 8
EPILOG = """**Examples**

`kvroute doctor http://10.0.0.7:8000 http://10.0.0.8:8000`

`kvroute doctor --config kvroute.yaml`

`kvroute doctor http://10.0.0.7:8000 --tokenizer /models/MODEL --passive`

`kvroute doctor --config kvroute.yaml --json | jq '.findings[].mend'`

Exit status: 0 nothing is wrong (notes do not count), 1 there are errors or warnings, 2 it could
not be run.
"""


def doctor(
    url: Annotated[
        list[str] | None,
        typer.Argument(help="Base URLs of replicas; without any, those of the settings."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings, the same as for `kvroute serve`.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json and chat template, as the gateway uses it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    passive: Annotated[
        bool,
        typer.Option(
            "--passive", help="Send no request that generates: ask and listen only, see less."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a replica may take for each answer.")
    ] = 5.0,
) -> None:
    """Check replicas for what silently breaks reuse, and say how to mend it.

    Asks each replica's control routes, listens to its KV events, and, unless --passive, sends it
    a handful of requests of a hundred tokens or so, with one token to generate.
    """
    try:
        settings = _settings(url, config, tokenizer)
        replicas = asyncio.run(_replicas(settings))
        tokenizers = load_tokenizers(settings)
    except ConfigError as error:
        typer.echo(f"kvroute: {error}", err=True)
        raise typer.Exit(2) from None
    facts = asyncio.run(_examine(replicas, settings, tokenizers, timeout, active=not passive))
    found = findings(facts, settings)
    if as_json:
        sys.stdout.write(orjson.dumps(_json(facts, found), option=orjson.OPT_INDENT_2).decode())
        sys.stdout.write("\n")
    else:
        render(facts, found, Console(), passive=passive)
    if any(each.severity is not Severity.NOTE for each in found):
        raise typer.Exit(1)


def _settings(urls: list[str] | None, config: Path | None, tokenizer: Path | None) -> Settings:
    """Raises ConfigError. A URL that the settings know keeps what they say of it."""
    if not urls:
        try:
            return load_settings(config, tokenizer=tokenizer)
        except ConfigError as error:
            if not str(error).startswith("replicas: none given"):
                raise
            raise ConfigError(
                "no replicas: give their URLs, or --config FILE with `replicas`"
            ) from None
    given = load_settings(
        config, tokenizer=tokenizer, replicas=[{"url": each} for each in dict.fromkeys(urls)]
    )
    if config is None:
        return given
    try:
        known = {each.url: each for each in load_settings(config).replicas}
    except ConfigError:  # it names no replicas: the URLs are all there is
        return given
    return given.model_copy(
        update={"replicas": [known.get(each.url, each) for each in given.replicas]}
    )


async def _replicas(settings: Settings) -> list[ReplicaConfig]:
    """Every replica by an address of its own. Raises ConfigError."""
    found = static_replicas(settings)
    for name in dns_names(settings):
        parts = urlsplit(name.url)
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(LOOKUP_S):
                addresses = sorted(set(await system_resolver(host, port)))
        except (OSError, TimeoutError) as error:
            raise ConfigError(f"{name.url}: it cannot be looked up: {error}") from None
        for address in addresses:
            shown = f"[{address}]" if ":" in address else address
            url = f"http://{shown}:{port}{parts.path}"
            found.append(ReplicaConfig(url=url, kv_events=name.kv_events, api_key=name.api_key))
    return found


async def _examine(
    replicas: list[ReplicaConfig],
    settings: Settings,
    tokenizers: Any,
    timeout_s: float,
    *,
    active: bool,
) -> tuple[ReplicaFacts, ...]:
    """Several at a time, with a word on standard error for each that is done."""
    slots = asyncio.Semaphore(AT_ONCE)
    progress = Console(stderr=True, highlight=False)
    done = 0
    async with httpx.AsyncClient(trust_env=False) as client:
        examiner = Examiner(client, settings, tokenizers, timeout_s, active)

        async def one(config: ReplicaConfig) -> ReplicaFacts:
            nonlocal done
            async with slots:
                facts = await examiner.examine(config)
            done += 1
            progress.print(f"{done}/{len(replicas)} {config.name} examined", style="dim")
            return facts

        return tuple(await asyncio.gather(*map(one, replicas)))


def _json(facts: tuple[ReplicaFacts, ...], found: tuple[Finding, ...]) -> dict[str, Any]:
    return {
        "replicas": [
            {
                "name": each.name,
                "url": each.url,
                "reached": not each.trouble,
                "engine": str(each.kind),
                "version": each.version,
                "model": each.model,
                "block_tokens": each.block_tokens,
                "ranks": sorted({publisher.rank for publisher in each.publishers}),
                "probed": each.probe is not None and not each.probe.refused,
            }
            for each in facts
        ],
        "findings": [each.describe() for each in found],
    }
