"""Errors of the index, one tree.

CacheIndexError
├── MalformedBatch        a frame or payload from a publisher that is not a batch of KV events
├── EmbeddedServerError   the private Valkey server did not start
├── RadixInconsistent     a change does not fit the mirror: something in between was missed
└── IndexUnavailable      Redis cannot be reached, or answered something the index cannot use
"""

from __future__ import annotations

__all__ = [
    "CacheIndexError",
    "EmbeddedServerError",
    "IndexUnavailable",
    "MalformedBatch",
    "RadixInconsistent",
]


class CacheIndexError(Exception):
    """Base of everything this package raises on purpose."""


class MalformedBatch(CacheIndexError):
    """A publisher sent something that cannot be read. `reason` is one of a fixed set of words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EmbeddedServerError(CacheIndexError):
    """The private Valkey server did not come up within its deadline."""


class RadixInconsistent(CacheIndexError):
    """A change does not fit what the mirror has: it missed something and must start over."""


class IndexUnavailable(CacheIndexError):
    """Redis is unreachable, too slow, or without the state the caller relied on."""
