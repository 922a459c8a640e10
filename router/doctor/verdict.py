"""What a finding is: what was seen, why it matters, how to mend it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """ERROR: nothing is reused, or wrongly. WARNING: less, or nobody can tell. NOTE: to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one replica, or with several beside each other.

    `code` names the kind and never changes its meaning; `replica` is empty where it is the fleet.
    """

    code: str
    severity: Severity
    replica: str
    seen: str
    why: str
    mend: str

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "severity": str(self.severity)}


def ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """Worst first, then by replica; in the order they were found otherwise."""
    rank = {severity: place for place, severity in enumerate(Severity)}
    return tuple(sorted(found, key=lambda each: (rank[each.severity], each.replica)))
