"""Who may import whom, and that the documents keep up with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.policy import POLICIES

ROOT = Path(__file__).parents[1]
OURS = {"router", "cache_index", "loadgen"}
MAY_IMPORT = {
    "cache_index": {"cache_index"},
    "router": {"router", "cache_index"},
    "loadgen": {"loadgen", "cache_index", "router.policy"},
    "loadgen/replica": {"loadgen"},
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    allowed = MAY_IMPORT[package]
    for path in sorted(ROOT.joinpath(package).rglob("*.py")):
        for name in imports(path):
            if name.split(".")[0] in OURS:
                fits = any(name == each or name.startswith(f"{each}.") for each in allowed)
                assert fits, f"{path.relative_to(ROOT)} imports {name}"


def test_every_policy_is_documented() -> None:
    text = ROOT.joinpath("router/policy/README.md").read_text("utf-8")
    assert [name for name in POLICIES if f"`{name}`" not in text] == []


def test_every_module_is_in_the_architecture() -> None:
    text = ROOT.joinpath("ARCHITECTURE.md").read_text("utf-8")
    modules = [
        path.relative_to(ROOT)
        for package in ("router", "cache_index", "loadgen")
        for path in ROOT.joinpath(package).rglob("*.py")
        if not path.name.startswith("__")
    ]
    assert [str(path) for path in modules if f"`{path.name}`" not in text] == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "benchmarks/README.md"])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        if "://" not in target:
            assert path.parent.joinpath(target).exists(), target
