"""Runs the application under uvicorn: socket, start-up line, signals, drain.

SIGTERM --> /readyz 503, answers are their connections' last
   |  drain_notice_s: whoever balances load over gateways sees it and stops sending
listener closed, idle connections closed
   |  drain_s: running requests finish
what still runs is cut: streams end in an error event
   |
exit 0; a second signal, at any time, cuts at once: exit 1
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from router.app import HotPath, create_app
from router.config import Settings
from router.connection import ClientConnection
from router.errors import ConfigError

logger = logging.getLogger("kvroute.server")

BACKLOG = 2048
GC_THRESHOLD = 20_000
SPARE_FILES = 1024
"""Open files besides clients and the connections to replicas made for them."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
GOODBYE_S = 1.5
"""How long a request that is cut may take to say so."""


class _CutAnswers(logging.Filter):
    """Drops uvicorn's complaint about answers we break off on purpose and have logged ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        cut = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
        return not cut and "without completing response" not in record.getMessage()


def run(settings: Settings, *, exit_on_stdin_eof: bool = False) -> bool:
    """Serve until told to stop; whether that was in order, and not cut short by a second signal.

    Raises ConfigError when the address cannot be had.
    """
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _plain_lines("kvroute.access")
    logging.getLogger("uvicorn.error").addFilter(_CutAnswers())
    # One text at a time gains nothing from threads inside the tokenizer, and pays for them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app = create_app(settings)
    listener = _listen(settings.host, settings.port)
    _allow_files(2 * settings.max_connections + SPARE_FILES)
    config = uvicorn.Config(
        app,
        http=ClientConnection,
        loop="auto",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )
    server = GatewayServer(config, app, settings, exit_on_stdin_eof=exit_on_stdin_eof)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))
    return not server.force_exit


class GatewayServer(uvicorn.Server):
    """uvicorn's server with a start-up line on standard output, and a drain of our own."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: HotPath,
        settings: Settings,
        *,
        exit_on_stdin_eof: bool,
    ) -> None:
        super().__init__(config)
        self._exit_on_stdin_eof = exit_on_stdin_eof
        self._gateway = app.gateway
        self._settings = settings
        self._signals = 0
        self._told = asyncio.Event()
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving, and say where."""
        await super().startup(sockets)
        if self.started and sockets:
            _settle_garbage()
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"kvroute: listening on http://{shown}:{port}", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal begins the drain, the second ends it; a third is no longer caught."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        if self._exit_on_stdin_eof:
            _watch_stdin(lambda: loop.call_soon_threadsafe(self._drain))
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            self.force_exit = True
            self._forced.set()
        self._drain()

    def _drain(self) -> None:
        self._gateway.drain()
        self._told.set()

    async def main_loop(self) -> None:
        """Serve until told to stop, and until that has been noticed."""
        await self.on_tick(0)
        await self._told.wait()
        await self._wait(self._forced, limit_s=self._settings.drain_notice_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, let requests finish, cut what is left, end the application."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._drained()
        if self.server_state.tasks:
            await self._cut_requests()
            await self._wait(self._gateway.clients.none_left, limit_s=GOODBYE_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self.lifespan.shutdown()

    async def _drained(self) -> None:
        """Until every client has read its answer, the limit, or a second signal."""
        none_left = self._gateway.clients.none_left
        await self._wait(none_left, self._forced, limit_s=self._settings.drain_s)
        if none_left.is_set() and self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=GOODBYE_S)

    @staticmethod
    async def _wait(*events: asyncio.Event, limit_s: float) -> None:
        """Until one of the events, or the limit."""
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()

    async def _cut_requests(self) -> None:
        tasks = list(self.server_state.tasks)
        logger.warning("cutting %d requests that did not finish in time", len(tasks))
        for _ in range(2):  # the first makes a request say goodbye, the second cuts that short
            for task in tasks:
                task.cancel()
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=GOODBYE_S)
                tasks = list(left)


def _plain_lines(name: str) -> None:
    """A logger whose lines are its messages alone: JSON, for machines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    plain = logging.getLogger(name)
    plain.handlers = [handler]
    plain.propagate = False
    plain.setLevel(logging.INFO)


def _settle_garbage() -> None:
    """What start-up made lives for ever: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error}") from None
    return listener


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _watch_stdin(ended: Callable[[], object]) -> None:
    """A parent that dies closes our standard input: end as on a first SIGTERM."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        with suppress(RuntimeError):  # the loop has closed: it has ended already
            ended()

    threading.Thread(target=wait, name="stdin-eof", daemon=True).start()
