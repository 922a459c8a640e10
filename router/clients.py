"""What all clients' connections share: limits, counters, whether the gateway is draining."""

from __future__ import annotations

import asyncio
import logging
from random import getrandbits

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.answer import whole_answer
from router.config import Settings
from router.errors import RequestError

logger = logging.getLogger("kvroute.clients")

CLIENTS_KEY = "kvroute.clients"
"""Where the application's lifespan state carries the `Clients` to the connections."""


class Clients:
    """`settings` are the limits, `count` is the number of connections, `none_left`: it is 0."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self.settings = settings
        self.draining = False
        self.count = 0
        self.none_left = asyncio.Event()
        self.none_left.set()
        gauge = Gauge("kvroute_client_connections", "Clients connected.", registry=registry)
        gauge.set_function(lambda: self.count)
        self._refused = Counter(
            "kvroute_client_refused",
            "Refused before any route, by reason: bad_http, head_timeout, head_too_large, "
            "target_too_long, too_many_connections.",
            ("reason",),
            registry=registry,
        )

    def came(self) -> int:
        """One more connection; how many that makes."""
        self.count += 1
        self.none_left.clear()
        return self.count

    def left(self) -> None:
        """One connection fewer."""
        self.count -= 1
        if self.count == 0:
            self.none_left.set()

    def refused(self, error: RequestError) -> bytes:
        """Count a refusal; the bytes of its answer."""
        self._refused.labels(error.code).inc()
        request_id = b"%032x" % getrandbits(128)
        logger.info("refused %s: %s: %s", request_id.decode(), error.code, error.message)
        return whole_answer(error, request_id)
