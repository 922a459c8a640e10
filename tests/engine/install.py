"""Where scripts/install-engine put the real engine, and whether it is the one wanted."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = REPOSITORY / "scripts" / "engine-lock.txt"


class EngineMissing(Exception):
    """The engine is not there, not whole, or not of this lock."""


@dataclass(frozen=True)
class Engine:
    """The engine's own Python, with vLLM in it, and the folder of the model it serves."""

    python: Path
    model: Path


def engine_folder() -> Path:
    named = os.environ.get("KVROUTE_ENGINE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "kvroute" / "engine"


def find_engine(folder: Path) -> Engine:
    """The engine installed in `folder`; raises EngineMissing with what to do."""
    try:
        note = json.loads((folder / "engine.json").read_text())
        engine = Engine(folder / note["python"], folder / note["model"])
        lock_sha256 = note["lock_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineMissing(f"no engine in {folder}: run scripts/install-engine") from error
    if lock_sha256 != hashlib.sha256(LOCK.read_bytes()).hexdigest():
        raise EngineMissing(
            f"the engine in {folder} is of another lock: run scripts/install-engine"
        )
    if not engine.python.exists() or not engine.model.is_dir():
        raise EngineMissing(f"the engine in {folder} is damaged: run scripts/install-engine")
    return engine
