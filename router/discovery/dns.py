"""Replicas behind a DNS name, such as a headless Kubernetes service: all its addresses.

The name is looked up again and again. An address that appears joins; one that vanishes is drained
and then removed. A look-up that fails or is late changes nothing: a resolver in trouble must not
take a fleet down, and replicas that are gone are found out by probes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from urllib.parse import urlsplit

from router.config import ReplicaConfig
from router.replicas import Fleet, Replica

logger = logging.getLogger("kvroute.discovery")

LOOKUP_TIMEOUT_S = 3.0
JITTER = 0.1

Resolver = Callable[[str, int], Awaitable[Iterable[str]]]
"""Host and port to IP addresses. Raises OSError."""


async def system_resolver(host: str, port: int) -> list[str]:
    """What the system says. A host with addresses of both families is the same engine twice, so
    IPv6 counts only where there is no IPv4. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {
        family: [str(info[4][0]) for info in found if info[0] == family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return by_family[socket.AF_INET] or by_family[socket.AF_INET6]


class DnsDiscovery:
    """Keeps the fleet's members from DNS; `make` makes a replica, not probed yet."""

    def __init__(
        self,
        fleet: Fleet,
        names: Iterable[ReplicaConfig],
        make: Callable[[ReplicaConfig], Replica],
        *,
        interval_s: float,
        resolver: Resolver = system_resolver,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        random: Random | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._random = random or Random()
        self._names = [_Name(fleet, name, make, resolver, timeout_s) for name in names]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look every name up once, then go on in the background."""
        await asyncio.gather(*(name.look_up() for name in self._names))
        self._tasks = [asyncio.create_task(self._follow(name)) for name in self._names]

    async def close(self) -> None:
        """Stop looking up; the replicas stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in self._names:
            name.give_up()

    async def _follow(self, name: _Name) -> None:
        while True:
            jitter = self._random.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(self._interval_s * jitter)
            await name.look_up()


class _Name:
    """One name: its latest answer, and the replicas that were made from it."""

    def __init__(
        self,
        fleet: Fleet,
        config: ReplicaConfig,
        make: Callable[[ReplicaConfig], Replica],
        resolver: Resolver,
        timeout_s: float,
    ) -> None:
        parts = urlsplit(config.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._path = parts.path
        self._config = config
        self._fleet = fleet
        self._make = make
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._answer: frozenset[str] = frozenset()
        self._made: dict[str, Replica] = {}
        self._pending: asyncio.Future[Iterable[str]] | None = None
        self._trouble = ""

    async def look_up(self) -> None:
        """Ask once, within the deadline, and change the fleet by the answer. Never raises."""
        # A look-up that hangs holds a thread: it is waited for again, never started twice.
        pending = self._pending or asyncio.ensure_future(self._resolver(self._host, self._port))
        self._pending = pending
        done, _ = await asyncio.wait({pending}, timeout=self._timeout_s)
        if not done:
            self._complain("takes long")
            return
        self._pending = None
        try:
            answer = frozenset(pending.result())
        except Exception as error:
            self._complain(f"failed: {error}")
            return
        if self._trouble:
            logger.info("looking up %s works again", self._host)
            self._trouble = ""
        if answer:  # no address at all is a failure in another form
            self._follow(answer)

    def _complain(self, trouble: str) -> None:
        """A warning once, not at each look-up while it stays as it is."""
        level = logging.DEBUG if trouble == self._trouble else logging.WARNING
        self._trouble = trouble
        stands = "its last answer stands" if self._answer else "it has no replicas yet"
        logger.log(level, "looking up %s %s; %s", self._host, trouble, stands)

    def give_up(self) -> None:
        """At exit: a look-up that is still under way is of no use."""
        if self._pending is not None:
            self._pending.cancel()

    def _follow(self, answer: frozenset[str]) -> None:
        for address in sorted(answer - self._answer):
            self._appeared(address)
        for address in sorted(self._answer - answer):
            self._vanished(address)
        self._answer = answer

    def _appeared(self, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        name = f"{host}:{self._port}"
        present = self._fleet.replicas.get(name)
        if present is None:
            url = f"http://{name}{self._path}"
            given = self._config
            config = ReplicaConfig(url=url, kv_events=given.kv_events, api_key=given.api_key)
            replica = self._made[address] = self._make(config)
            self._fleet.add(replica)
            logger.info("replica %s joins: an address of %s", name, self._host)
        elif present.leaving and present is self._made.get(address):
            self._fleet.undrain(present)
            logger.info("replica %s stays: %s has its address again", name, self._host)
        else:
            logger.info("replica %s is known already, as an address of %s too", name, self._host)

    def _vanished(self, address: str) -> None:
        replica = self._made.get(address)
        if replica is not None and self._fleet.replicas.get(replica.name) is replica:
            logger.info("replica %s leaves: %s has lost its address", replica.name, self._host)
            self._fleet.remove(replica)
