"""One process of the demo, which ends with this one and whose last words are kept."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from cache_index.lifeline import supervised
from loadgen.errors import StartError

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 8.0
GRACE_S = 3.0
_TAIL_BYTES = 8192
_TAIL_LINES = 20


class Member(Protocol):
    """A process of the fleet, as far as its death is concerned."""

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> None: ...
    def output(self) -> str: ...
    def obituary(self) -> str: ...


class Child:
    """One supervised process whose first line on stdout says where it serves."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._tails: list[bytearray] = []
        assert process.stderr is not None
        self._readers = [asyncio.create_task(self._keep_tail(process.stderr))]

    @classmethod
    async def start(cls, name: str, command: Sequence[str]) -> Child:
        """Starts `command` with no settings of a gateway in its environment."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVROUTE_")}
        process = await asyncio.create_subprocess_exec(
            *supervised(command, grace_s=GRACE_S),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            # A Ctrl-C in the terminal is for this process to handle.
            start_new_session=True,
        )
        return cls(name, process)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def announcement(self) -> str:
        """The first line of stdout. Raises StartError without one in time."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                line = await stdout.readline()
        except TimeoutError:
            raise StartError(f"{self._name} was not up in {START_DEADLINE_S:.0f} s") from None
        if not line:
            await self.wait()
            raise StartError(self.obituary())
        # What else it prints must not fill the pipe.
        self._readers.append(asyncio.create_task(self._keep_tail(stdout)))
        return line.decode(errors="replace")

    async def wait(self) -> None:
        """Until the process has ended by itself and its output has been read."""
        await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)

    def output(self) -> str:
        """The last lines of what it has printed, on each of its streams."""
        lines = [_last_lines(tail) for tail in self._tails]
        return "\n".join(each for each in lines if each)

    def obituary(self) -> str:
        last = self.output() or "(no output)"
        return f"{self._name} ended with code {self.returncode}:\n{last}"

    async def close(self) -> None:
        """Ends the process and waits until nothing of it is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _keep_tail(self, stream: asyncio.StreamReader) -> None:
        tail = bytearray()
        self._tails.append(tail)
        # read() and not readline(): a line of any length must not stop the draining. A piece may
        # end anywhere, so that lines are only made of the whole tail.
        while piece := await stream.read(65536):
            tail += piece
            del tail[:-_TAIL_BYTES]


def _last_lines(tail: bytearray) -> str:
    return "\n".join(tail.decode(errors="replace").splitlines()[-_TAIL_LINES:])
