"""Replicas behind a DNS name: who joins, who leaves, and what a failing resolver may do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from router.config import ReplicaConfig, Settings
from router.discovery import DnsDiscovery, dns_names, static_replicas, system_resolver
from router.load import FleetLoad
from router.replicas import Fleet, Replica
from tests.router.support import answer_ok, chat, running_gateway, scripted

SETTINGS = Settings(replicas=[{"url": "http://10.9.9.9:1"}, {"url": "dns+http://pods:8000/base"}])


class Zone:
    """A resolver that answers what a test says, and counts."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Iterable[str] | Exception = addresses
        self.asked: list[tuple[str, int]] = []
        self.hold: asyncio.Event | None = None

    async def __call__(self, host: str, port: int) -> Iterable[str]:
        self.asked.append((host, port))
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def asked_again(self, times: int = 2) -> None:
        count = len(self.asked) + times  # the one before may have been under way
        async with asyncio.timeout(5):
            while len(self.asked) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def discovering(
    zone: Callable[..., Any], **given: Any
) -> AsyncIterator[tuple[Fleet, FleetLoad]]:
    load = FleetLoad(1000.0, lambda: 0.0)
    make = partial(Replica.from_config, settings=SETTINGS)
    fleet = Fleet(map(make, static_replicas(SETTINGS)), load)
    names = dns_names(SETTINGS)
    discovery = DnsDiscovery(fleet, names, make, interval_s=0.001, resolver=zone, **given)
    await discovery.start()
    try:
        yield fleet, load
    finally:
        await discovery.close()


async def test_addresses_join_and_leave_as_the_name_says() -> None:
    zone = Zone("10.0.0.1", "fd00::1")
    async with discovering(zone) as (fleet, _):
        assert zone.asked[0] == ("pods", 8000)
        assert list(fleet.replicas) == ["10.9.9.9:1", "10.0.0.1:8000", "[fd00::1]:8000"]
        first = fleet.replicas["10.0.0.1:8000"]
        assert (first.url, first.base_path) == ("http://10.0.0.1:8000/base", b"/base")
        zone.answer = ["10.0.0.1", "10.0.0.2", "10.9.9.9"]
        await zone.asked_again()
        ports = {"10.9.9.9:1", "10.0.0.1:8000", "10.0.0.2:8000", "10.9.9.9:8000"}
        assert fleet.replicas.keys() == ports
        assert fleet.replicas["10.0.0.1:8000"] is first


@pytest.mark.parametrize("answer", [socket.gaierror("no such host"), ValueError("odd"), []])
async def test_a_failing_resolver_keeps_the_last_answer(answer: Any) -> None:
    zone = Zone("10.0.0.1")
    async with discovering(zone) as (fleet, _):
        zone.answer = answer
        await zone.asked_again()
        assert "10.0.0.1:8000" in fleet.replicas
        zone.answer = ["10.0.0.2"]
        await zone.asked_again()
        assert list(fleet.replicas) == ["10.9.9.9:1", "10.0.0.2:8000"]


async def test_a_failing_resolver_is_a_warning_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvroute.discovery")
    zone = Zone()
    zone.answer = OSError("no such name")
    async with discovering(zone):
        await zone.asked_again(5)
        zone.answer = ["10.0.0.1"]
        await zone.asked_again()
        zone.answer = OSError("no such name")
        await zone.asked_again(5)
    assert [each.message for each in caplog.records if each.message.startswith("looking")] == [
        "looking up pods failed: no such name; it has no replicas yet",
        "looking up pods works again",
        "looking up pods failed: no such name; its last answer stands",
    ]


async def test_a_late_resolver_holds_nothing_up_and_is_asked_once() -> None:
    zone = Zone("10.0.0.1")
    zone.hold = asyncio.Event()
    async with discovering(zone, timeout_s=0.005) as (fleet, _):
        assert list(fleet.replicas) == ["10.9.9.9:1"]
        await asyncio.sleep(0.05)
        assert len(zone.asked) == 1
        zone.hold.set()
        await zone.asked_again()
        assert "10.0.0.1:8000" in fleet.replicas


async def test_a_resolver_that_never_answers_does_not_hold_up_the_exit() -> None:
    zone = Zone()
    zone.hold = asyncio.Event()
    async with asyncio.timeout(2):
        async with discovering(zone, timeout_s=0.005):
            pass


async def test_a_vanished_address_finishes_its_requests_and_may_return_meanwhile() -> None:
    zone = Zone("10.0.0.1", "10.0.0.2")
    async with discovering(zone) as (fleet, load):
        first, second = (fleet.replicas[f"10.0.0.{n}:8000"] for n in (1, 2))
        with load.rank(first.name, 0).take(1, True), load.rank(second.name, 0).take(1, True):
            zone.answer = ["10.0.0.3"]
            await zone.asked_again()
            assert [first.state, second.state] == ["draining", "draining"]
            zone.answer = ["10.0.0.2", "10.0.0.3"]
            await zone.asked_again()
            assert [first.draining, second.draining] == [True, False]
        assert first.name not in fleet.replicas
        assert fleet.replicas[second.name] is second
        zone.answer = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        await zone.asked_again()
        assert fleet.replicas[first.name] is not first  # a new one, with a load of its own


async def test_what_an_operator_removed_is_not_added_again_while_the_name_still_has_it() -> None:
    zone = Zone("10.0.0.1", "10.0.0.2")
    async with discovering(zone) as (fleet, _):
        fleet.remove(fleet.replicas["10.0.0.1:8000"])
        await zone.asked_again()
        assert "10.0.0.1:8000" not in fleet.replicas


async def test_a_name_serves_requests_end_to_end() -> None:
    async with scripted(answer_ok) as (replica,):
        url = f"dns+http://localhost:{replica.port}"
        async with running_gateway(url) as running:
            answer = await running.post(chat())
            assert answer.status_code == 200
            assert answer.headers["x-kvroute-replica"] == replica.name


async def test_a_host_of_both_families_is_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def info(family: int, *address: Any) -> tuple[Any, ...]:
        return (family, socket.SOCK_STREAM, 6, "", address)

    found = [info(socket.AF_INET6, "fd00::1", 1, 0, 0), info(socket.AF_INET, "10.0.0.1", 1)]

    async def getaddrinfo(*args: Any, **kw: Any) -> list[tuple[Any, ...]]:
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await system_resolver("both", 1) == ["10.0.0.1"]
    del found[1]
    assert await system_resolver("both", 1) == ["fd00::1"]


def test_a_dns_url_takes_no_name() -> None:
    with pytest.raises(ValueError, match="named host:port"):
        ReplicaConfig(url="dns+http://pods:8000", name="mine")
