"""The files of deploy/ as data, and the command line tools that check them."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

TOOL_DEADLINE_S = 60.0

Run = Callable[..., subprocess.CompletedProcess[str]]
ServeStatus = Callable[[int], AbstractContextManager[int]]


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def run_tool(root: Path) -> Run:
    """Runs a tool that the `test` extra installs; without it the test fails rather than skips."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))

    def run(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        tool = shutil.which(name, path=folders)
        assert tool, f"{name} is missing: pip install -e '.[test]'"
        return subprocess.run(
            [tool, *map(str, args)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=TOOL_DEADLINE_S,
            check=False,
        )

    return run


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests must not reach the gateway's configuration."""
    for name in [name for name in os.environ if name.startswith("KVROUTE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def serve_status() -> ServeStatus:
    """A server on a free port that answers a health check with one status, all else with 404."""

    @contextmanager
    def serve(status: int) -> Iterator[int]:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path in ("/livez", "/health") else 404)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()

    return serve
