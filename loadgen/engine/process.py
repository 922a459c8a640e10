"""A process of the engine: supervised, logged, and asked over HTTP whether it serves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from loadgen.engine.errors import ReplicaError
from loadgen.engine.supervisor import SCRATCH_PREFIX, supervised

STOP_DEADLINE_S = 40.0
TEMP_BYTES = 40
_LOG_LINES = 30
_CAUSE_LINES = 6
_CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")
_POLL_S = 0.25
# No proxy: everything here is on this machine.
_open = build_opener(ProxyHandler({})).open


def fetch(url: str, timeout_s: float = 5.0, data: bytes | None = None) -> bytes:
    """The body of an answer that is 2xx; `data` makes it a POST. Raises OSError."""
    try:
        with _open(url, data, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error


def make_scratch() -> Path:
    """A temporary folder with a short name: vLLM makes sockets in it, of 107 bytes at most."""
    usual = tempfile.gettempdir()
    place = usual if len(os.fsencode(usual)) <= TEMP_BYTES else "/tmp"
    return Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=place))


class EngineProcess:
    """A command that may be started, ended and started again. Ends when this process does.

    `remove` is a folder to be removed at an ordered end, and when this process dies.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        health_url: str,
        remove: Path | None = None,
    ) -> None:
        self.name = name
        self._command = command
        self._remove = remove
        self._scratch: Path | None = None
        self._environment = environment
        self._log = log
        self._health_url = health_url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the supervision; None while not started."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs or is not started, 128 + n after signal n."""
        return self._process.poll() if self._process else None

    @property
    def ended(self) -> bool:
        """Whether it was started and has ended without being told to."""
        return self.returncode is not None

    def spawn(self, keep_open: Sequence[int] = ()) -> None:
        """Start without waiting. `keep_open` are file descriptors that its supervision holds."""
        assert self._process is None, "already started"
        # Known here as well, for the case that its supervision is killed.
        self._scratch = make_scratch()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                supervised(self._command, self._scratch, self._remove),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                pass_fds=keep_open,
            )

    def serves(self) -> bool:
        """Whether it serves now."""
        try:
            fetch(self._health_url)
        except OSError:
            return False
        return True

    def wait_healthy(self, deadline_s: float, pause: Callable[[float], None] = time.sleep) -> None:
        """`deadline_s` is on time.monotonic()'s clock. Raises ReplicaError."""
        while time.monotonic() < deadline_s:
            if self.ended:
                raise ReplicaError(f"{self.name} ended while starting:\n{self.log_tail()}")
            if self.serves():
                return
            pause(_POLL_S)
        tail = self.log_tail()
        self.end()
        raise ReplicaError(f"{self.name} was not healthy in time:\n{tail}")

    def order_end(self) -> None:
        """Let it begin to end; `end` waits for that."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, order: bytes = b"") -> None:
        """End every process of it and wait until nothing is left; `kill` in a line is SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            with suppress(OSError, ValueError):
                process.stdin.write(order)
                process.stdin.close()
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ReplicaError(f"{self.name} did not end:\n{self.log_tail()}") from None
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines of what it has printed, and before them what looks like a cause."""
        if not self._log.exists():
            return ""
        lines = self._log.read_text(errors="replace").splitlines()
        # vLLM's last words are of the process that waited for the one that failed.
        causes = [line for line in lines[:-_LOG_LINES] if _CAUSE.search(line)]
        return "\n".join([*causes[:_CAUSE_LINES], *lines[-_LOG_LINES:]])
