"""The whole way in processes of its own: simulated replicas, the gateway, its private Valkey."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadgen.tokenizer import default_folder

START_S = 20.0


@dataclass
class Process:
    """A child that ends when its standard input closes, so that it cannot outlive the tests."""

    popen: subprocess.Popen[str]
    first_line: str

    def end(self) -> int:
        if self.popen.poll() is None:
            self.popen.terminate()
        return self._reap()

    def kill(self) -> None:
        self.popen.kill()
        self._reap()

    def _reap(self) -> int:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        return self.popen.wait(20)


def start(*arguments: str) -> Process:
    command = [sys.executable, *arguments, "--exit-on-stdin-eof"]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdout is not None
    line = popen.stdout.readline()
    if not line:
        raise AssertionError(f"{arguments} ended with {popen.wait(20)} before it was ready")
    return Process(popen, line)


def start_replicas(count: int, *options: str) -> tuple[Process, list[str]]:
    process = start("-m", "loadgen.replica", "--replicas", str(count), *options)
    return process, [each["url"] for each in json.loads(process.first_line)["replicas"]]


def start_gateway(urls: list[str], *options: str) -> tuple[Process, str]:
    replicas = [part for url in urls for part in ("--replica", url)]
    fixed = ("--port", "0", "--log-level", "warning")
    process = start("-m", "router.cli", "serve", *fixed, *replicas, *options)
    return process, process.first_line.rsplit(" ", 1)[1].strip()


@dataclass
class Whole:
    replicas: list[str]
    url: str
    client: httpx.Client
    gateway: Process

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        body = {
            "model": "sim-model",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": text}],
            **fields,
        }
        return self.client.post("/v1/chat/completions", json=body)

    def ready(self) -> dict[str, Any]:
        content: dict[str, Any] = self.client.get("/readyz").json()
        return content

    def wait(self, met: Any, timeout_s: float = START_S) -> None:
        """Until `met()` is true; other processes give no event to wait for."""
        end_s = time.monotonic() + timeout_s
        while not met():
            if time.monotonic() > end_s:
                raise AssertionError(f"not within {timeout_s:g} s: {self.ready()}")
            time.sleep(0.02)

    def wait_for_index(self, trust: str = "exact") -> None:
        def current() -> bool:
            ready = self.ready()
            trusts = [each["trust"] for each in ready["replicas"].values() if each["healthy"]]
            return ready["index"] == "available" and trusts == [trust] * len(trusts)

        self.wait(current)

    def holds(self, text: str, tokens_at_least: int) -> None:
        """Until the index knows that a replica holds this prompt."""
        self.wait(
            lambda: int(self.chat(text).headers["x-kvroute-matched-tokens"]) >= tokens_at_least
        )


def tokenizer_options() -> tuple[str, str]:
    return "--tokenizer", str(default_folder())


@contextmanager
def whole_way(
    count: int = 2, *, replica: tuple[str, ...] = (), gateway: tuple[str, ...] | None = None
) -> Iterator[Whole]:
    replicas, urls = start_replicas(count, *replica)
    try:
        process, url = start_gateway(urls, *(tokenizer_options() if gateway is None else gateway))
        try:
            with httpx.Client(base_url=url, timeout=20) as client:
                whole = Whole(urls, url, client, process)
                whole.wait_for_index()
                yield whole
        finally:
            process.end()
    finally:
        replicas.end()


def valkey_children(pid: int) -> list[int]:
    """Valkey servers in the process tree of `pid`."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, rest = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)] = int(rest.split()[1])
            names[int(entry.name)] = head.partition("(")[2]

    def below(child: int) -> bool:
        while child and child != pid:
            child = parents.get(child, 0)
        return child == pid

    return [each for each, name in names.items() if "valkey" in name and below(each)]
