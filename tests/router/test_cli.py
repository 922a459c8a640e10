"""The command as a person meets it."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import version


def kvroute(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_help_lists_commands_of_every_package() -> None:
    done = kvroute("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout and "demo" in done.stdout


def test_the_version_is_the_packages() -> None:
    done = kvroute("--version")
    assert (done.returncode, done.stdout) == (0, f"kvroute {version('kvroute')}\n")


def test_help_of_serve_has_examples() -> None:
    done = kvroute("serve", "--help")
    assert done.returncode == 0
    assert "Examples" in done.stdout and "kvroute.yaml" in done.stdout


def test_wrong_settings_exit_2_and_name_the_field() -> None:
    done = kvroute("serve")
    assert done.returncode == 2
    assert "replicas: none given; pass --replica" in done.stderr
    done = kvroute("serve", "--replica", "http://127.0.0.1:1", "--policy", "best")
    assert done.returncode == 2
    assert done.stderr.startswith("kvroute: policy: ") and "Traceback" not in done.stderr


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kvroute("serve", "--replica", "http://127.0.0.1:1", "--port", port)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
