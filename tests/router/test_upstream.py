"""Connections to replicas, on their own."""

from __future__ import annotations

import asyncio
import errno

import pytest

from router.errors import Overloaded, UpstreamUnavailable
from router.upstream import ReplicaPool
from tests.router.support import closed_port


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (errno.EMFILE, Overloaded),
        (errno.EADDRNOTAVAIL, Overloaded),
        (errno.ECONNREFUSED, UpstreamUnavailable),
        (errno.EHOSTUNREACH, UpstreamUnavailable),
    ],
)
async def test_running_out_of_sockets_is_not_blamed_on_a_replica(
    number: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*args: object, **kwargs: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
    pool = ReplicaPool("127.0.0.1", 1, connect_timeout_s=1, keepalive_s=1)
    with pytest.raises(raised):
        await pool.acquire()


async def test_a_closed_port_is_unavailable() -> None:
    pool = ReplicaPool("127.0.0.1", closed_port(), connect_timeout_s=1, keepalive_s=1)
    with pytest.raises(UpstreamUnavailable, match="connecting failed"):
        await pool.acquire()
