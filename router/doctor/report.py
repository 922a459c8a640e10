"""What the doctor says to a person: who was examined, and what is wrong with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from router.doctor.facts import Probe, ReplicaFacts
from router.doctor.verdict import Finding, Severity

COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
LEAST_WIDTH = 100


def render(
    facts: Sequence[ReplicaFacts], found: Sequence[Finding], console: Console, *, passive: bool
) -> None:
    """Who was examined, each finding, and a sentence."""
    if not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    console.print(_examined(facts))
    for each in found:
        _wrong(each, console)
    console.print(_sentence(facts, found, passive=passive))


def _examined(facts: Sequence[ReplicaFacts]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("replica", "engine", "model", "block", "events from ranks", "reused"):
        table.add_column(name, overflow="fold")
    for each in facts:
        reached = [str(one.rank) for one in each.publishers if one.connected]
        table.add_row(
            _shown(each.name),
            "not reached" if each.trouble else _shown(f"{each.kind} {each.version or ''}".strip()),
            _shown(each.model),
            str(each.block_tokens or ""),
            ", ".join(reached) or ("" if each.trouble else "none"),
            _reuse(each.probe),
        )
    return table


def _reuse(probe: Probe | None) -> str:
    """What the second of two equal prompts reused."""
    if probe is None:
        return "not tried"
    if probe.refused:
        return "refused"
    cached = probe.cached[1]
    return "not told" if cached is None else f"{cached} of {probe.prompt_tokens} tokens"


def _wrong(finding: Finding, console: Console) -> None:
    """One finding. What is to be typed is not broken into lines, so that it can be copied."""
    colour = COLOURS[finding.severity]
    head = f"[bold {colour}]{finding.severity}[/] [bold]{finding.code}[/] {_shown(finding.replica)}"
    console.print(head, highlight=False)
    words = Table.grid(padding=(0, 2))
    words.add_row("  seen", _shown(finding.seen))
    words.add_row("  why", _shown(finding.why))
    console.print(words, highlight=False)
    console.print(f"  mend  {_shown(finding.mend)}\n", soft_wrap=True, highlight=False)


def _sentence(facts: Sequence[ReplicaFacts], found: Sequence[Finding], *, passive: bool) -> str:
    counts = Counter(each.severity for each in found)
    listed = [_counted(counts[each], str(each)) for each in Severity if counts[each]]
    about = _counted(len(facts), "replica")
    verdict = f"{about}: {', '.join(listed)}." if listed else f"{about}: nothing is wrong."
    if passive:
        verdict += " With --passive no request was sent: reuse itself was not tried."
    return verdict


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _shown(text: str) -> str:
    """What a replica may have said: shown, and never obeyed by a terminal."""
    return escape("".join(each if each.isprintable() or each == "\n" else "?" for each in text))
