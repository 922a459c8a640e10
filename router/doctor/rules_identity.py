"""Judged of prompts: whether tokens, salts and pools mean the same here and in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from router.doctor.facts import Ids, Probe, ReplicaFacts
from router.doctor.verdict import Finding, Severity

_NO_MATCH = (
    "prompts are looked up under other tokens than they are cached under: "
    "nothing matches, or too little"
)
_SAME_FOLDER = (
    "give the gateway the folder that the engine serves (`tokenizer`, or `tokenizers: "
    "{MODEL: FOLDER}`), from the same revision"
)


def identity_findings(facts: ReplicaFacts) -> Iterator[Finding]:
    """All of them for one replica that could be asked."""
    yield from _tokens(facts)
    yield from _salts(facts)
    yield from _pool(facts)


def _tokens(facts: ReplicaFacts) -> Iterator[Finding]:
    """The tokenizer first: where it differs, a template cannot be judged."""
    own, said, probe = facts.own, facts.said, facts.probe
    if differ(own.text, said.text):
        yield _tokenizer(facts, *_difference(own.text, said.text))
        return
    if differ(own.chat, said.chat):
        yield _template(facts, *_difference(own.chat, said.chat))
        return
    for heard in probe.heard if probe else ():
        expected = probe.expected if probe else None
        if expected is None or not heard.tokens or heard.tokens == expected[: len(heard.tokens)]:
            continue
        if probe is not None and probe.chat:
            yield _template(facts, *_difference(expected, heard.tokens))
        else:
            yield _tokenizer(facts, *_difference(expected, heard.tokens))
        return


def differ(own: Ids | None, said: Ids | None) -> bool:
    """Whether both are known and not the same."""
    return own is not None and said is not None and own != said


def _difference(own: Ids | None, said: Ids | None) -> tuple[int, int, int]:
    """Lengths of both, and the first place where they part."""
    ours, theirs = own or (), said or ()
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return len(ours), len(theirs), first


def _tokenizer(facts: ReplicaFacts, ours: int, theirs: int, first: int) -> Finding:
    return Finding(
        "tokenizer_differs",
        Severity.ERROR,
        facts.name,
        f"the same text has {ours} tokens here and {theirs} in the engine; "
        f"they part at token {first}",
        _NO_MATCH,
        f"{_SAME_FOLDER}; without `tokenizer` the replica itself is asked",
    )


def _template(facts: ReplicaFacts, ours: int, theirs: int, first: int) -> Finding:
    return Finding(
        "template_differs",
        Severity.ERROR,
        facts.name,
        f"the same conversation has {ours} tokens here and {theirs} in the engine; "
        f"they part at token {first}",
        _NO_MATCH,
        f"{_SAME_FOLDER}; if the engine runs with --chat-template FILE, copy FILE into that folder "
        "as chat_template.jinja",
    )


def _salts(facts: ReplicaFacts) -> Iterator[Finding]:
    probe = facts.probe
    if probe is None or probe.refused:
        return
    # Another salt: all of it must be computed. The gateway's view is no better than the engine's.
    if probe.cached[2] and not _shared_beginning(probe):
        yield Finding(
            "salts_ignored",
            Severity.ERROR,
            facts.name,
            f"a prompt reused {probe.cached[2]} tokens that were cached under another cache_salt",
            "tenants share a cache that was meant to keep them apart, "
            "and the gateway counts such reuse as impossible",
            "upgrade the engine to one that knows cache_salt; of connectors, leave out those that "
            "do not (ExampleConnector does not)",
        )
    told = [each for each in probe.heard if each.on_rank is not None]
    if told and not any(each.salted for each in told) and not probe.cached[2]:
        yield Finding(
            "salts_not_told",
            Severity.WARNING,
            facts.name,
            "a salted prompt was told of without its salt",
            "blocks of salted prompts are credited to prompts without a salt, which will miss",
            "upgrade vLLM to 0.19 or newer, whose events carry extra_keys",
        )
    if any(each.pool_unsalted for each in told):
        yield _pool_unsalted(facts)


def _shared_beginning(probe: Probe) -> bool:
    """Whether the first request under a fresh salt was a hit already: then salts say nothing."""
    return bool(probe.cached[0])


def _pool_unsalted(facts: ReplicaFacts) -> Finding:
    return Finding(
        "pool_unsalted",
        Severity.NOTE,
        facts.name,
        "a salted prompt's blocks in the pool were announced without their salt",
        "taken at its word it would draw tenants where they miss; so while salts are in use, what "
        "it announces counts for nothing",
        "nothing to set in LMCache 0.5; do not count on the pool for salted requests",
    )


def _pool_mode_unknown(facts: ReplicaFacts) -> Finding:
    return Finding(
        "pool_mode_unknown",
        Severity.NOTE,
        facts.name,
        "it announces blocks in a pool, and does not tell by which connector (vLLM does in "
        "developer mode only)",
        "some connectors never tell that a block has left the pool: it would stay credited",
        "see to it that its --kv-transfer-config has, for LMCache, kv_connector_extra_config "
        '{"lmcache.mp.mp_transfer_mode":"lmcache_driven"}',
    )


def _pool(facts: ReplicaFacts) -> Iterator[Finding]:
    connector = facts.connector
    if connector is None and any(each.pool for each in (facts.probe.heard if facts.probe else ())):
        yield _pool_mode_unknown(facts)
    if connector is None or "LMCache" not in connector.name:
        return
    if connector.mode == "lmcache_driven":
        return
    in_process = "MP" not in connector.name
    yield Finding(
        "pool_without_removals",
        Severity.WARNING,
        facts.name,
        f"{connector.name} with transfer mode {connector.mode or 'unset'}: it never tells that a "
        "block has left the pool",
        "what the pool has dropped stays credited, or its blocks are not told of at all",
        (
            "use LMCacheMPConnector with an `lmcache server`, and "
            if in_process
            else "in --kv-transfer-config set kv_connector_extra_config "
        )
        + '{"lmcache.mp.mp_transfer_mode":"lmcache_driven"}',
    )
