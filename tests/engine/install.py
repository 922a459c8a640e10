"""The installed engine under the name that the tests use; it lives in loadgen.engine."""

from __future__ import annotations

from loadgen.engine.errors import EngineMissing
from loadgen.engine.install import (
    LMCACHE_LOCK,
    LOCK,
    REPOSITORY,
    Engine,
    engine_folder,
    find_engine,
)

__all__ = [
    "LMCACHE_LOCK",
    "LOCK",
    "REPOSITORY",
    "Engine",
    "EngineMissing",
    "engine_folder",
    "find_engine",
]
