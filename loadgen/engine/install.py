"""Where scripts/install-engine put the real engine, and whether it is the one wanted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.engine.errors import EngineMissing

REPOSITORY = Path(__file__).resolve().parents[2]
# Only in a checkout: an installed package has no scripts beside it.
LOCK = REPOSITORY / "scripts" / "engine-lock.txt"
LMCACHE_LOCK = REPOSITORY / "scripts" / "engine-lmcache-lock.txt"


@dataclass(frozen=True)
class Engine:
    """The engine's own Python, with vLLM in it, and the folder of the model it serves.

    `lmcache` is the Python that has LMCache as well; None if that is not installed as wanted.
    `versions` are those of the packages that matter most.
    """

    python: Path
    model: Path
    lmcache: Path | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def with_lmcache(self) -> Path:
        """The Python that has LMCache; raises EngineMissing."""
        if self.lmcache is None:
            raise EngineMissing(f"LMCache is not installed beside the engine: {remedy()}")
        return self.lmcache


def engine_folder() -> Path:
    """$KVROUTE_ENGINE_DIR, else the folder that scripts/install-engine uses by default."""
    named = os.environ.get("KVROUTE_ENGINE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "kvroute" / "engine"


def find_engine(folder: Path) -> Engine:
    """The engine installed in `folder`; raises EngineMissing with what to do."""
    try:
        note = json.loads((folder / "engine.json").read_text())
        python, model, versions = folder / note["python"], folder / note["model"], note["versions"]
        engine = Engine(python, model, _lmcache(folder, note), dict(versions))
        lock_sha256 = note["lock_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineMissing(f"no engine in {folder}: {remedy()}") from error
    if not _is_of(LOCK, lock_sha256):
        raise EngineMissing(f"the engine in {folder} is of another lock: {remedy()}")
    if not engine.python.exists() or not engine.model.is_dir():
        raise EngineMissing(f"the engine in {folder} is damaged: {remedy()}")
    return engine


def _lmcache(folder: Path, note: Mapping[str, str]) -> Path | None:
    python = folder / note.get("lmcache_python", "nowhere")
    wanted = _is_of(LMCACHE_LOCK, note.get("lmcache_lock_sha256", ""))
    return python if wanted and python.exists() else None


def _is_of(lock: Path, lock_sha256: str) -> bool:
    return not lock.exists() or lock_sha256 == hashlib.sha256(lock.read_bytes()).hexdigest()


def remedy() -> str:
    """What to do about an engine that is not there."""
    if LOCK.exists():
        return "run scripts/install-engine"
    return (
        "run scripts/install-engine from kvroute's source tree (it needs nothing but Python and"
        " pip), or name the folder of an installed engine in KVROUTE_ENGINE_DIR"
    )
