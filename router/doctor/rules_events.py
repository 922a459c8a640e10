"""Judged of one replica's publishers: whether they are on, reachable, complete and understood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from router.doctor.facts import Heard, Listing, Publisher, ReplicaFacts
from router.doctor.verdict import Finding, Severity
from router.engines import EngineKind

_BLIND = "the gateway does not learn what it holds: it is routed on load alone"
_VLLM_EVENTS = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
)
_SGLANG_EVENTS = (
    '--kv-events-config \'{"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
)


def event_findings(facts: ReplicaFacts) -> Iterator[Finding]:
    """All of them for one replica that could be asked."""
    if not facts.publishers:
        yield _nothing_published(facts)
        return
    crowded = _users(facts)
    yield from _ports(facts, crowded)
    yield from _missing_ranks(facts)
    for publisher in facts.publishers:
        if publisher.endpoint in crowded:
            continue
        if not publisher.connected and not publisher.dials:
            yield _not_reached(facts, publisher)
        else:
            yield from _replay(facts, publisher)
    yield from _heard(facts)


def events_flag(facts: ReplicaFacts) -> str:
    """How events are turned on. Ports are far apart: rank r adds r to each."""
    return _SGLANG_EVENTS if facts.kind is EngineKind.SGLANG else _VLLM_EVENTS


def _nothing_published(facts: ReplicaFacts) -> Finding:
    if facts.listing is Listing.UNTOLD and facts.kind is not EngineKind.SGLANG:
        return Finding(
            "events_not_listed",
            Severity.ERROR,
            facts.name,
            "GET /kv_event_sources does not tell its publishers (vLLM does from 0.31 on), and the "
            "settings name none",
            _BLIND,
            f"name them in kvroute.yaml: replicas: [{{url: {facts.url}, kv_events: [{{endpoint: "
            f"tcp://HOST:5557, replay_endpoint: tcp://HOST:5657}}]}}], and start it with "
            f"{events_flag(facts)}; or upgrade vLLM",
        )
    return Finding(
        "events_off",
        Severity.ERROR,
        facts.name,
        "it publishes no KV events"
        + (" (kv_events is empty in the settings)" if facts.listing is Listing.DECLARED else ""),
        _BLIND,
        f"start {facts.engine} with {events_flag(facts)}",
    )


def _users(facts: ReplicaFacts) -> dict[str, list[str]]:
    """Endpoints that are said to serve more than one purpose, and which."""
    users: dict[str, list[str]] = {}
    for each in facts.publishers:
        if not each.dials:  # what they dial is one socket for all of them
            users.setdefault(each.endpoint, []).append(f"rank {each.rank} publishes")
        if each.replay_endpoint is not None:
            users.setdefault(each.replay_endpoint, []).append(f"rank {each.rank} replays")
    return {endpoint: names for endpoint, names in users.items() if len(names) > 1}


def _ports(facts: ReplicaFacts, crowded: dict[str, list[str]]) -> Iterator[Finding]:
    for endpoint, names in crowded.items():
        yield Finding(
            "ports_overlap",
            Severity.ERROR,
            facts.name,
            f"{' and '.join(names)} on {endpoint}",
            "rank r adds r to both ports, so they run into each other: "
            "what one rank says is taken for another's, or nothing is heard",
            "put endpoint and replay_endpoint further apart than there are ranks: "
            "tcp://*:5557 and tcp://*:5657",
        )


def _missing_ranks(facts: ReplicaFacts) -> Iterator[Finding]:
    listed = {each.rank for each in facts.publishers}
    size = facts.dp_size or 0
    if len(listed) < size:
        missing = sorted(set(range(size)) - listed)[:8]
        yield Finding(
            "ranks_missing",
            Severity.WARNING,
            facts.name,
            f"it runs {size} data-parallel ranks, publishers are known of {len(listed)}"
            + (f"; missing: {', '.join(map(str, missing))}" if missing else ""),
            "what the other ranks hold is not known, and requests are not sent to them by rank",
            "name every rank's publisher under `kv_events` of this replica in the settings: "
            "rank, endpoint and replay_endpoint, the ports of rank r being r higher",
        )


def _not_reached(facts: ReplicaFacts, publisher: Publisher) -> Finding:
    own_words = [each for each in facts.endpoints if _dials(each)]
    if own_words:
        return Finding(
            "events_connect",
            Severity.ERROR,
            facts.name,
            f"rank {publisher.rank}: the engine was given the endpoint {own_words[0]}: without a "
            "wildcard it dials that address instead of listening there",
            _BLIND,
            f"write tcp://*:PORT for the host: start {facts.engine} with {events_flag(facts)}; or "
            "set kv_events_bind, so that the gateway listens at that port",
        )
    return Finding(
        "events_unreachable",
        Severity.ERROR,
        facts.name,
        f"rank {publisher.rank}: nobody answers at {publisher.endpoint}",
        _BLIND,
        "open the port to the gateway (container port, network policy, firewall); the engine must "
        "listen, with tcp://*:PORT as its endpoint; if it listens under another address, name that "
        "under `kv_events` of this replica in the settings",
    )


def _dials(endpoint: str) -> bool:
    """Whether an engine with this endpoint connects: what is no wildcard, ipc or inproc does.

    Another host's IP address can also be what `tcp://*:0` turned into: that one listens.
    """
    if "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
        return False
    host = urlsplit(endpoint).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return True
    return address.is_loopback or address.is_unspecified


def _replay(facts: ReplicaFacts, publisher: Publisher) -> Iterator[Finding]:
    if publisher.replay_endpoint is None:
        seen, mend = "has no replay endpoint", f"start {facts.engine} with {events_flag(facts)}"
    elif not publisher.replays:
        seen = f"does not answer at its replay endpoint {publisher.replay_endpoint}"
        mend = "open that port to the gateway, and write tcp://*:PORT for its host"
    else:
        return
    yield Finding(
        "replay_off",
        Severity.WARNING,
        facts.name,
        f"rank {publisher.rank} {seen}",
        "what was cached before the gateway connected, and whatever it misses, stays unknown: "
        "the source is trusted only partly, and dropped at each reconnect",
        mend,
    )


def _heard(facts: ReplicaFacts) -> Iterator[Finding]:
    probe = facts.probe
    if probe is None or probe.refused:
        return
    if probe.unreadable:
        yield Finding(
            "events_unreadable",
            Severity.ERROR,
            facts.name,
            f"{probe.unreadable} messages or events could not be read",
            "a removal may have been among them, so everything the source said is dropped",
            "check that endpoint and replay_endpoint are this engine's, and upgrade kvroute: "
            "a newer engine may have changed the format",
        )
    connected = {each.rank: each for each in facts.publishers if each.connected}
    deaf = [each for each in probe.heard if each.on_rank is None and each.rank in connected]
    if deaf and not probe.unreadable and facts.prefix_caching is not False:
        yield _silent(facts, deaf)
    for heard in probe.heard:
        if heard.on_rank is not None:
            yield from _misplaced(facts, heard, connected[heard.on_rank])


def _silent(facts: ReplicaFacts, deaf: list[Heard]) -> Finding:
    ranks = ", ".join(str(each.rank) for each in deaf)
    return Finding(
        "events_not_seen",
        Severity.ERROR,
        facts.name,
        f"a prompt was computed and no event told of it (rank {ranks})",
        _BLIND,
        "the endpoint is another engine's, or several engines answer under one URL: "
        f"compare `kv_events` in the settings with curl {facts.url}/kv_event_sources, "
        "and give each engine a URL of its own",
    )


def _misplaced(facts: ReplicaFacts, heard: Heard, publisher: Publisher) -> Iterator[Finding]:
    if not heard.topic.startswith(publisher.topic):
        yield Finding(
            "topic_differs",
            Severity.ERROR,
            facts.name,
            f"it publishes under the topic {heard.topic!r}, the settings say {publisher.topic!r}",
            _BLIND,
            f"set `topic` to {heard.topic!r} in the settings, or leave it out",
        )
    if heard.on_rank != heard.rank:
        yield Finding(
            "ranks_mixed",
            Severity.ERROR,
            facts.name,
            f"a request for rank {heard.rank} was told of by the publisher of rank {heard.on_rank}",
            "requests are sent to ranks that do not hold what is credited to them",
            "correct `rank` under `kv_events` in the settings; vLLM before 0.14 does not read "
            "X-data-parallel-rank: upgrade it, or give each rank a URL of its own",
        )


def shared_endpoints(fleet: tuple[ReplicaFacts, ...]) -> Iterator[Finding]:
    """Replicas whose publishers are said to be one and the same."""
    uses = Counter(
        (each.endpoint, facts.name)
        for facts in fleet
        for each in {one.endpoint: one for one in facts.publishers if not one.dials}.values()
    )
    by_endpoint: dict[str, list[str]] = {}
    for endpoint, name in uses:
        by_endpoint.setdefault(endpoint, []).append(name)
    for endpoint, names in by_endpoint.items():
        if len(names) > 1:
            yield Finding(
                "endpoint_shared",
                Severity.ERROR,
                ", ".join(sorted(names)),
                f"their events are said to come from one publisher, {endpoint}",
                "what one of them holds is credited to all of them",
                "give each its own endpoint: `kv_events` in the settings, --kv-events-config of "
                "the engines (another port for each on one host)",
            )
