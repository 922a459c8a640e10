"""Judged of one replica by itself: whether it answers, its release, its cache, its clock."""

from __future__ import annotations

from collections.abc import Iterator

from router.config import Settings
from router.doctor.facts import GATEWAY, Listing, ReplicaFacts
from router.doctor.reading import version_of
from router.doctor.verdict import Finding, Severity
from router.engines import EngineKind

CLOCK_TOLERANCE_S = 5.0
BUSY_S = 30.0
KV_EVENTS, RANK_HEADER, EXTRA_KEYS, SOURCES = (0, 9), (0, 14), (0, 19), (0, 31)
MISSES_TOLD = (0, 32)
"""Seen of this release: cached_tokens is told on a miss too. Others may leave it out."""


def engine_findings(facts: ReplicaFacts, settings: Settings) -> Iterator[Finding]:
    """All of them for one replica that could be asked."""
    yield from _asleep(facts)
    yield from _old(facts)
    yield from _caching(facts)
    yield from _details(facts)
    yield from _unit(facts, settings.base_unit_tokens)
    yield from _clock(facts)
    yield from _refused(facts)


def unreachable(facts: ReplicaFacts) -> Finding:
    """It could not be asked at all."""
    mend = f"see that it runs and that this host reaches {facts.url}: curl {facts.url}/v1/models"
    if "answered 401" in facts.trouble or "answered 403" in facts.trouble:
        mend = (
            "give the key that it was started with (--api-key): `replica_api_key`, or `api_key` of "
            "this replica; KVROUTE_REPLICA_API_KEY for a doctor without settings"
        )
    elif facts.trouble == GATEWAY:
        mend = (
            "name the replicas behind it; what it finds of them itself stands under its "
            "/admin/status"
        )
    why = "it gets no requests, and nothing else of it can be checked"
    return Finding("unreachable", Severity.ERROR, facts.name, facts.trouble, why, mend)


def _asleep(facts: ReplicaFacts) -> Iterator[Finding]:
    if facts.asleep:
        yield Finding(
            "asleep",
            Severity.NOTE,
            facts.name,
            "the engine sleeps (vllm:engine_sleep_state)",
            "requests to it would wait, so none was sent: reuse was not checked",
            f"wake it (curl -X POST {facts.url}/wake_up) and ask the doctor again",
        )


def _old(facts: ReplicaFacts) -> Iterator[Finding]:
    version = version_of(facts.version)
    if version is None or facts.kind is not EngineKind.VLLM or version >= SOURCES:
        return
    lacks, severity = [], Severity.NOTE
    if version < KV_EVENTS:
        lacks.append("KV events (0.9)")
        severity = Severity.ERROR
    if version < RANK_HEADER and (facts.dp_size or len(facts.publishers)) > 1:
        lacks.append("X-data-parallel-rank (0.14): a rank cannot be chosen")
        severity = min(severity, Severity.WARNING, key=list(Severity).index)
    if version < EXTRA_KEYS:
        lacks.append("extra_keys in events (0.19): salted prompts cannot be told apart")
        severity = min(severity, Severity.WARNING, key=list(Severity).index)
    lacks.append("GET /kv_event_sources (0.31): its publishers must be named in the settings")
    yield Finding(
        "engine_old",
        severity,
        facts.name,
        f"vLLM {facts.version} lacks " + "; ".join(lacks),
        "what an engine cannot do or tell, the gateway cannot use",
        "upgrade vLLM to 0.31 or newer",
    )


def _caching(facts: ReplicaFacts) -> Iterator[Finding]:
    sglang = facts.kind is EngineKind.SGLANG
    if facts.prefix_caching is False:
        where = "disable_radix_cache in /server_info" if sglang else "vllm:cache_config_info"
        yield Finding(
            "prefix_caching_off",
            Severity.ERROR,
            facts.name,
            f"prefix caching is off ({where})",
            "every prompt is computed from its beginning, wherever it is sent",
            "start SGLang without --disable-radix-cache"
            if sglang
            else "start vLLM with --enable-prefix-caching (its default), "
            "without --no-enable-prefix-caching",
        )
    elif facts.probe is not None and facts.probe.details and not facts.probe.cached[1]:
        yield Finding(
            "no_reuse",
            Severity.ERROR,
            facts.name,
            f"a prompt of {facts.probe.prompt_tokens} tokens was computed twice in a row",
            "what is cached is not found again: prefix caching is off, the cache is far too small, "
            "or several engines answer under one URL",
            "give each engine a URL of its own; start it with --enable-prefix-caching; "
            "watch vllm:kv_cache_usage_perc",
        )


def _details(facts: ReplicaFacts) -> Iterator[Finding]:
    probe = facts.probe
    if probe is None or probe.refused or probe.details:
        return
    version = version_of(facts.version)
    # Without a hit an older engine may say nothing though it would.
    if facts.prefix_caching is False and (version is None or version < MISSES_TOLD):
        return
    flag = "--enable-cache-report" if facts.kind is EngineKind.SGLANG else _DETAILS_FLAG
    yield Finding(
        "prompt_tokens_details_off",
        Severity.WARNING,
        facts.name,
        "answers carry no usage.prompt_tokens_details.cached_tokens",
        "nobody can tell predicted from real reuse: kvroute_cached_tokens_total and "
        "kvroute_misprediction_tokens_total stay at 0 for it",
        f"start {facts.engine} with {flag}",
    )


_DETAILS_FLAG = "--enable-prompt-tokens-details"


def _unit(facts: ReplicaFacts, base_tokens: int) -> Iterator[Finding]:
    answers = facts.probe.heard if facts.probe else ()
    heard = {size for each in answers for size in each.block_tokens}
    units = heard or ({facts.block_tokens} if facts.block_tokens else set())
    misfits = sorted(size for size in units if size % base_tokens)
    flag = "--page-size" if facts.kind is EngineKind.SGLANG else "--block-size"
    if misfits:
        yield Finding(
            "unit_misfit",
            Severity.ERROR,
            facts.name,
            f"its blocks have {misfits[0]} tokens, not a multiple of base_unit_tokens "
            f"({base_tokens})",
            "its events cannot be put into the index: it is routed on load alone",
            f"set base_unit_tokens to a divisor of {misfits[0]} in every gateway, "
            f"or start {facts.engine} with {flag} {base_tokens}",
        )
    if len(heard) > 1:
        yield Finding(
            "unit_mixed",
            Severity.WARNING,
            facts.name,
            f"its events come in blocks of {', '.join(map(str, sorted(heard)))} tokens",
            "one source has one unit; blocks of another are left out, "
            "so the index knows less than is there",
            "give everything that publishes for this rank one block size "
            f"({flag}; lmcache server --chunk-size)",
        )


def _clock(facts: ReplicaFacts) -> Iterator[Finding]:
    ahead_s = max((facts.clock_ahead_s or 0.0, *_by_events(facts)), key=abs)
    if abs(ahead_s) < CLOCK_TOLERANCE_S:
        return
    way = "ahead of" if ahead_s > 0 else "behind"
    yield Finding(
        "clock",
        Severity.WARNING,
        facts.name,
        f"its clock is {abs(ahead_s):.0f} s {way} this host's",
        "times in its events, logs and traces do not line up with the gateway's, and pools that "
        "forget by time forget too early or too late",
        "run a time service (chrony, systemd-timesyncd) on both hosts: chronyc tracking",
    )


def _by_events(facts: ReplicaFacts) -> Iterator[float]:
    """A rank may run on a host of its own. An event may also be late because all are busy."""
    for heard in facts.probe.heard if facts.probe else ():
        if heard.on_rank is not None and not 0 <= heard.late_s < BUSY_S:
            yield -heard.late_s


def _refused(facts: ReplicaFacts) -> Iterator[Finding]:
    if facts.probe is not None and facts.probe.refused:
        yield Finding(
            "probe_refused",
            Severity.NOTE if facts.listing is not Listing.UNTOLD else Severity.WARNING,
            facts.name,
            f"a tiny request was not answered: {facts.probe.refused}",
            "whether prompts are reused, and whether events say so, was not checked",
            f"try {facts.url}/v1/completions by hand; models that only embed need no mending",
        )
