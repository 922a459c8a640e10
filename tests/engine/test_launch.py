"""How a replica is started."""

from __future__ import annotations

import socket
from pathlib import Path

from loadgen.engine import launch
from loadgen.engine.launch import free_ports


def test_free_ports_differ_and_are_none_that_the_kernel_gives_away() -> None:
    """Another's connection must not take one while the engine is still loading."""
    ports = free_ports(20)
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert all(1024 < port < given_from for port in ports)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_where_the_kernel_gives_all_ports_away_one_of_these_must_do(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_GIVEN_PORTS", Path("/proc/no/such/file"))
    ports = free_ports(3)
    assert len(set(ports)) == 3 and min(ports) > 0
