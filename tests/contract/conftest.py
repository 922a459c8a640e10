"""Where the contract tests' clients come from, and the gateway they all talk to.

litellm (the `contract` extra) and the npm client (`npm ci` in `node/`) are heavy: tests that need
them are left out where they are not installed, unless KVROUTE_CONTRACT_REQUIRED=1 says that they
must be there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.fleet import OneReplica
from tests.whole import Whole, start_gateway, tokenizer_options

NODE = Path(__file__).resolve().parent / "node"
PARTS = {
    "contract": importlib.util.find_spec("litellm") is not None,
    "node": shutil.which("node") is not None and (NODE / "node_modules/openai").is_dir(),
}
REQUIRED = os.environ.get("KVROUTE_CONTRACT_REQUIRED") == "1"
SPEED = ("--decode-step", "0.02", "--max-num-seqs", "256")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if REQUIRED:
        return

    def missing(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(part) and not there for part, there in PARTS.items())

    left_out = [item for item in items if missing(item)]
    items[:] = [item for item in items if not missing(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """A part that is required and missing is a failure, not a skip."""
    for part, there in PARTS.items():
        if request.node.get_closest_marker(part) and not there:
            pytest.fail(f"the part for tests marked `{part}` is not installed", pytrace=False)


class Served:
    """A gateway before one replica that may be killed and comes back before the next test."""

    def __init__(self) -> None:
        self.replica = OneReplica(*SPEED)
        self._gateway, self.url = start_gateway([self.replica.url], *tokenizer_options())
        self.client = httpx.Client(base_url=self.url, timeout=20)
        self.whole = Whole([self.replica.url], self.url, self.client, self._gateway)

    def kill(self) -> None:
        """As `kill -9` does, while a request is under way."""
        self.replica.kill()

    def revive(self) -> None:
        if self.replica.process.popen.poll() is not None:
            asyncio.run(self.replica.restart())
        self.whole.wait(lambda: all(each["healthy"] for each in self._replicas()))
        self.idle()

    def _replicas(self) -> list[dict[str, object]]:
        return list(self.whole.ready()["replicas"].values())

    def idle(self) -> None:
        """Until no load is held: whatever a client did, its requests have ended."""

        def none() -> bool:
            lines = self.client.get("/metrics").text.splitlines()
            held = ("kvroute_running_requests{", "kvroute_queued_prefill_tokens{")
            return all(line.endswith(" 0.0") for line in lines if line.startswith(held))

        self.whole.wait(none, 5)

    def end(self) -> None:
        self.client.close()
        self._gateway.end()
        self.replica.end()


@pytest.fixture(scope="session")
def _served() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.end()


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    _served.revive()
    yield _served
    if _served.replica.process.popen.poll() is None:
        _served.idle()
