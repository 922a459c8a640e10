"""When the tests marked `engine` run, and the real replica they share.

They run when somebody chose them: KVROUTE_ENGINE_REQUIRED=1, `-m engine`, or this folder named on
the command line. Then a missing engine is a failure. Any other run leaves them out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.install import Engine, EngineMissing, engine_folder, find_engine
from tests.engine.replica import Replica, ReplicaOptions

# What is switched off by default: tools that the model chooses itself, and /render.
EVERYTHING = ReplicaOptions(
    more={"tool-call-parser": "hermes"}, flags=("enable-auto-tool-choice", "enable-scale-out")
)
HERE = Path(__file__).resolve().parent


def chosen(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args)
    return (
        os.environ.get("KVROUTE_ENGINE_REQUIRED") == "1"
        or "engine" in config.option.markexpr
        or any(path.resolve().is_relative_to(HERE) for path in named)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen(config):
        return
    left_out = [item for item in items if item.get_closest_marker("engine")]
    items[:] = [item for item in items if not item.get_closest_marker("engine")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def short_temp() -> Iterator[Path]:
    """A folder for temporary files whose name is short, and that must be empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    yield folder
    left = sorted(path.name for path in folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return find_engine(engine_folder())
    except EngineMissing as error:
        missing = str(error)
    pytest.fail(missing, pytrace=False)


@pytest.fixture(scope="session")
def replica(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """One real vLLM for the whole run, healthy when handed out."""
    with Replica(engine, tmp_path_factory.mktemp("replica"), EVERYTHING) as running:
        running.start()
        yield running
