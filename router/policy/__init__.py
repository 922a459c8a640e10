"""Policies: pure functions from a snapshot to a choice. README.md gives formula and use of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from router.policy.base import Candidate, Choice, Policy, Snapshot, least
from router.policy.cost import cost, predicted_ttft_s
from router.policy.explain import MEANINGS, Parts, parts, why
from router.policy.least_load import least_load
from router.policy.prefix_only import prefix_only
from router.policy.random import random
from router.policy.round_robin import round_robin

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "cost": cost,
        "round_robin": round_robin,
        "least_load": least_load,
        "prefix_only": prefix_only,
        "random": random,
    }
)

__all__ = [
    "MEANINGS",
    "POLICIES",
    "Candidate",
    "Choice",
    "Parts",
    "Policy",
    "Snapshot",
    "least",
    "parts",
    "predicted_ttft_s",
    "why",
]
