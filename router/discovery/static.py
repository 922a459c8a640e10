"""The configured list, parted: replicas that are named by it, and names that stand for several."""

from __future__ import annotations

from router.config import ReplicaConfig, Settings


def static_replicas(settings: Settings) -> list[ReplicaConfig]:
    """Replicas with a URL of their own."""
    return [each for each in settings.replicas if not each.by_dns]


def dns_names(settings: Settings) -> list[ReplicaConfig]:
    """Entries that stand for all addresses of a name."""
    return [each for each in settings.replicas if each.by_dns]
