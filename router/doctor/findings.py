"""From facts to findings: a pure function, so that the same facts always give the same answer."""

from __future__ import annotations

from router.config import Settings
from router.doctor.facts import ReplicaFacts
from router.doctor.rules_engine import engine_findings, unreachable
from router.doctor.rules_events import event_findings, shared_endpoints
from router.doctor.rules_fleet import fleet_findings
from router.doctor.rules_identity import identity_findings
from router.doctor.verdict import Finding, ordered


def findings(facts: tuple[ReplicaFacts, ...], settings: Settings) -> tuple[Finding, ...]:
    """What is wrong with these replicas, worst first; nothing where nothing is."""
    found = [unreachable(each) for each in facts if each.trouble]
    asked = tuple(each for each in facts if not each.trouble)
    for each in asked:
        found += engine_findings(each, settings)
        found += event_findings(each)
        found += identity_findings(each)
    found += shared_endpoints(asked)
    found += fleet_findings(asked)
    return ordered(list(dict.fromkeys(found)))
