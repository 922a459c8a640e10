"""Judged of replicas of one model beside each other: what should be the same and is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from router.doctor.facts import ReplicaFacts
from router.doctor.verdict import Finding, Severity

Read = Callable[[ReplicaFacts], Hashable | None]


def fleet_findings(fleet: Sequence[ReplicaFacts]) -> Iterator[Finding]:
    """All of them for the replicas that could be asked."""
    by_model: dict[str, list[ReplicaFacts]] = defaultdict(list)
    for facts in fleet:
        by_model[facts.model].append(facts)
    for model, group in by_model.items():
        yield from _units(model, group)
        yield from _texts(model, group)
        yield from _weights(model, group)
        yield from _versions(model, group)
        yield from _lengths(model, group)


def _units(model: str, group: list[ReplicaFacts]) -> Iterator[Finding]:
    for odd, theirs, common in _odd(group, lambda each: each.block_tokens):
        yield Finding(
            "unit_differs",
            Severity.WARNING,
            odd,
            f"blocks of {theirs} tokens; other replicas of {model} have {common}",
            "they reuse prefixes of different length, and cannot share a pool",
            f"start them all with the same --block-size (--page-size of SGLang), such as {common}",
        )


def _texts(model: str, group: list[ReplicaFacts]) -> Iterator[Finding]:
    """Only where the replicas themselves differ; against our own tokenizer is judged elsewhere."""
    texts = list(_odd(group, lambda each: each.said.text))
    for odd, _, _ in texts:
        yield Finding(
            "tokenizer_differs",
            Severity.ERROR,
            odd,
            f"it tokenizes the same text unlike other replicas of {model}",
            "a prompt that is sent to one is looked up by tokens of another: nothing matches",
            "serve the same revision of the model and its tokenizer everywhere (--tokenizer, "
            "--tokenizer-revision)",
        )
    for odd, _, _ in _odd(group, lambda each: each.said.chat) if not texts else ():
        yield Finding(
            "template_differs",
            Severity.ERROR,
            odd,
            f"it renders the same conversation unlike other replicas of {model}",
            "a chat that is sent to one is looked up by tokens of another: nothing matches",
            "start them all with the same --chat-template, or all without one",
        )


def _weights(model: str, group: list[ReplicaFacts]) -> Iterator[Finding]:
    for odd, theirs, common in _odd(group, lambda each: each.root or None):
        yield Finding(
            "model_differs",
            Severity.WARNING,
            odd,
            f"{model} is {theirs} there and {common} elsewhere (`root` in /v1/models)",
            "if these are different weights, answers depend on the replica, "
            "and a shared pool would mix their caches",
            "serve different weights under different names: --served-model-name",
        )


def _versions(model: str, group: list[ReplicaFacts]) -> Iterator[Finding]:
    for odd, theirs, common in _odd(group, lambda each: each.version):
        yield Finding(
            "version_differs",
            Severity.NOTE,
            odd,
            f"release {theirs}; other replicas of {model} run {common}",
            "fine while an upgrade rolls; releases may hash and lay out blocks differently in a "
            "shared pool",
            "finish the upgrade",
        )


def _lengths(model: str, group: list[ReplicaFacts]) -> Iterator[Finding]:
    for odd, theirs, common in _odd(group, lambda each: each.max_model_len):
        yield Finding(
            "length_differs",
            Severity.NOTE,
            odd,
            f"takes up to {theirs} tokens; other replicas of {model} take {common}",
            "the gateway sends long prompts to any of them, and some are refused",
            f"start them all with the same --max-model-len, such as {common}",
        )


def _odd(group: list[ReplicaFacts], read: Read) -> Iterator[tuple[str, Hashable, Hashable]]:
    """Replicas that differ from most, by what they have: (names, theirs, what most have)."""
    named: dict[Hashable, list[str]] = defaultdict(list)
    for facts in group:
        value = read(facts)
        if value is not None:
            named[value].append(facts.name)
    if len(named) < 2:
        return
    # Of equally many the first one seen is the common one.
    common, _ = Counter({value: len(names) for value, names in named.items()}).most_common(1)[0]
    for value, names in named.items():
        if value != common:
            yield ", ".join(sorted(names)), value, common
