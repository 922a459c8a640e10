"""The index: which replica or pool holds the KV cache of which prompt prefix."""

from cache_index.blocks import chain_hashes, chain_packed, pack_hashes, pack_tokens
from cache_index.errors import (
    CacheIndexError,
    EmbeddedServerError,
    IndexUnavailable,
    MalformedBatch,
)
from cache_index.identity import ModelIdentity, Root
from cache_index.service import CacheIndex
from cache_index.types import DEVICE, HOST, Holder, SourceKey, SourceSpec, SourceStatus, Trust

__all__ = [
    "DEVICE",
    "HOST",
    "CacheIndex",
    "CacheIndexError",
    "EmbeddedServerError",
    "Holder",
    "IndexUnavailable",
    "MalformedBatch",
    "ModelIdentity",
    "Root",
    "SourceKey",
    "SourceSpec",
    "SourceStatus",
    "Trust",
    "chain_hashes",
    "chain_packed",
    "pack_hashes",
    "pack_tokens",
]
