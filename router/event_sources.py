"""GET /admin/sources: every KV event source, how far it is trusted and why, and what went wrong."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from fastapi import APIRouter, Depends

from cache_index.types import ListenerStatus, SourceStatus
from router.admin import guard
from router.config import Settings


class Followed(Protocol):
    """What is asked of the index."""

    def sources(self) -> list[SourceStatus]:
        """Trust and progress of each source."""
        ...

    def listeners(self) -> list[ListenerStatus]:
        """Sockets that publishers dial."""
        ...


def source_routes(settings: Settings, index: Followed) -> APIRouter:
    """The route, guarded as all of /admin is."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(guard(settings))])

    @router.get("/sources")
    async def list_sources(replica: str | None = None) -> dict[str, Any]:
        """Sources by replica and rank, and the sockets that publishers dial."""
        return {
            "sources": [
                describe_source(each) for each in index.sources() if replica in (None, each.replica)
            ],
            "listeners": [asdict(each) for each in index.listeners()],
        }

    return router


def describe_source(source: SourceStatus) -> dict[str, Any]:
    """One source as JSON. Ages and lags are seconds, units tokens."""
    return {
        "replica": source.replica,
        "rank": source.rank,
        "trust": str(source.trust),
        "reason": source.reason,
        "connection": {
            "style": "dials" if source.dials else "connected_to",
            "endpoint": source.endpoint,
            "replay_endpoint": source.replay_endpoint,
            "topic": source.topic,
            "connected": source.connected,
        },
        "life": source.epoch,
        "last_sequence": source.last_seq,
        "batches": source.batches,
        "last_batch_age_s": source.last_batch_age_s,
        "lag_s": source.lag_s,
        "unit_tokens": source.unit_tokens,
        "blocks": source.blocks,
        "leading": source.leading,
        "counts": dict(sorted(source.counts.items())),
        "malformed": {reason: n for reason, n in sorted(source.malformed.items()) if n},
    }
