"""Runs the application under uvicorn: socket, start-up line, signals, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from router.app import create_app
from router.config import Settings
from router.connection import ClientConnection
from router.errors import ConfigError

BACKLOG = 2048
GC_THRESHOLD = 20_000


class _CutAnswers(logging.Filter):
    """Drops uvicorn's complaint about answers we break off on purpose and have logged ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def run(settings: Settings, *, exit_on_stdin_eof: bool = False) -> None:
    """Serve until told to stop. Raises ConfigError when the address cannot be had."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_CutAnswers())
    app = create_app(settings)
    listener = _listen(settings.host, settings.port)
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
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(int(settings.drain_s), 1),
    )
    with _quiet_signals():
        if exit_on_stdin_eof:
            _end_with_stdin()
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_AnnouncingServer(config).serve(sockets=[listener]))


class _AnnouncingServer(uvicorn.Server):
    """Says on standard output where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            _settle_garbage()
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"kvroute: listening on http://{shown}:{port}", flush=True)


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


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signals it caught once more after its drain: a clean exit is 0."""
    previous = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_with_stdin() -> None:
    """A parent that dies closes our standard input: end as on SIGTERM."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin-eof", daemon=True).start()
