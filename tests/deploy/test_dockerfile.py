"""The image: what hadolint says of it, and what its instructions do."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continuation lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


@pytest.fixture(scope="module")
def stages(root: Path) -> list[list[tuple[str, str]]]:
    """Instructions per stage; what precedes the first FROM is left out."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions((root / "deploy/Dockerfile").read_text()):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def only(stage: list[tuple[str, str]], wanted: str) -> str:
    [value] = [rest for word, rest in stage if word == wanted]
    return value


def environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    pairs = " ".join(rest for word, rest in stage if word == "ENV")
    return dict(pair.split("=", 1) for pair in pairs.split())


def health_command(stage: list[tuple[str, str]]) -> list[str]:
    command: list[str] = json.loads(only(stage, "HEALTHCHECK").split(" CMD ", 1)[1])
    return command


def test_hadolint_has_nothing_to_say(run_tool: Any) -> None:
    result = run_tool("hadolint", "--failure-threshold", "style", "deploy/Dockerfile")
    assert result.returncode == 0, result.stdout + result.stderr


def test_hadolint_finds_an_unpinned_base(run_tool: Any, tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /srv\n")
    result = run_tool("hadolint", bad)
    assert result.returncode != 0
    assert "DL3006" in result.stdout


def test_it_runs_as_a_numbered_user_that_is_not_root(stages: Any) -> None:
    user, group = only(stages[-1], "USER").split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_it_starts_the_project_s_command_without_a_shell(
    stages: Any, project: dict[str, Any]
) -> None:
    [entrypoint] = json.loads(only(stages[-1], "ENTRYPOINT"))
    assert entrypoint in project["project"]["scripts"]
    assert json.loads(only(stages[-1], "CMD")) == ["serve"]


def test_the_final_stage_compiles_and_installs_nothing(stages: Any) -> None:
    assert len(stages) == 2
    runs = [rest for word, rest in stages[-1] if word == "RUN"]
    assert not [run for run in runs if re.search(r"\b(apt|apt-get|install|make|gcc)\b", run)]
    assert environment(stages[-1])["PYTHONDONTWRITEBYTECODE"] == "1"


def test_both_stages_have_the_same_base(stages: Any) -> None:
    """The virtual environment's interpreter is a link into the base."""
    bases = {only(stage, "FROM").split(" AS ")[0] for stage in stages}
    assert bases == {"python:${PYTHON}"}


def test_the_build_gets_what_the_wheel_is_made_of(
    stages: Any, project: dict[str, Any], root: Path
) -> None:
    copied = {name for word, rest in stages[0] if word == "COPY" for name in rest.split()[:-1]}
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {"pyproject.toml", project["project"]["readme"], *packages}
    needed.update(project["project"]["license-files"])
    assert copied == needed
    allowed = {
        line[1:]
        for line in (root / "deploy/Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert allowed == needed


def test_the_context_starts_out_empty(root: Path) -> None:
    lines = (root / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    after = rules[rules.index("!loadgen") :]
    assert any(fnmatch.fnmatch("router/__pycache__", rule) for rule in after)


def check_health(command: list[str], port: int) -> int:
    assert command[0] == "python"
    result = subprocess.run(
        [sys.executable, *command[1:]],
        env=os.environ | {"KVROUTE_PORT": str(port)},
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    return result.returncode


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_asks_livez(
    stages: Any, serve_status: Any, status: int, healthy: bool
) -> None:
    with serve_status(status) as port:
        assert (check_health(health_command(stages[-1]), port) == 0) is healthy


def test_the_health_check_fails_when_nothing_listens(stages: Any, serve_status: Any) -> None:
    with serve_status(200) as port:
        pass
    assert check_health(health_command(stages[-1]), port) != 0


def test_the_health_check_s_port_is_the_gateway_s(stages: Any, clean_environment: None) -> None:
    from router.config import Settings

    default = Settings().port
    assert only(stages[-1], "EXPOSE") == str(default)
    assert f"'KVROUTE_PORT', '{default}'" in health_command(stages[-1])[-1]
