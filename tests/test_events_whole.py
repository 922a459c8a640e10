"""KV events the whole way: engines that dial the gateway, and engines that sleep."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from loadgen.tokenizer import default_folder
from tests.whole import Whole, start_gateway, start_replicas, whole_way

LONG = "The lamps along the quay were lit one after the other, and nobody spoke. " * 20


def free_ports(count: int) -> int:
    """The first of some consecutive ports that nobody used a moment ago."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for more in range(1, count):
                    with socket.socket() as next_one:
                        next_one.bind(("127.0.0.1", port + more))
            except OSError:
                continue
            return port


def config(folder: Path, urls: list[str], port: int | None) -> tuple[str, str]:
    path = folder / "kvroute.yaml"
    bind = {} if port is None else {"kv_events_bind": f"tcp://127.0.0.1:{port}"}
    settings = {"replicas": [{"url": url} for url in urls], "tokenizer": str(default_folder())}
    path.write_text(json.dumps({**settings, **bind}))
    return "--config", str(path)


def test_an_engine_that_dials_and_one_that_listens_are_both_followed(tmp_path: Path) -> None:
    port = free_ports(2)
    dial = ("--kv-events", "connect", "--kv-port", str(port), "--topic", "kv@dialer@sim-model")
    dialer, (dialing,) = start_replicas(1, *dial)
    listener, (listening,) = start_replicas(1)
    gateway, url = start_gateway([], *config(tmp_path, [dialing, listening], port))
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            whole = Whole([dialing, listening], url, client, gateway)
            whole.wait_for_index()
            for number in range(2):
                text = f"{number} {LONG}"
                first = whole.chat(text)
                whole.holds(text, 64)
                again = whole.chat(text)
                assert again.headers["x-kvroute-replica"] == first.headers["x-kvroute-replica"]
            names = {dialing.removeprefix("http://"), listening.removeprefix("http://")}
            trust = {name: each["trust"] for name, each in whole.ready()["replicas"].items()}
            assert trust == dict.fromkeys(names, "exact")
    finally:
        gateway.end()
        dialer.end()
        listener.end()


def test_a_gateway_without_a_socket_says_what_an_engine_dials(tmp_path: Path) -> None:
    port = free_ports(2)
    dialer, urls = start_replicas(1, "--kv-events", "connect", "--kv-port", str(port))
    gateway, url = start_gateway([], *config(tmp_path, urls, None))
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            whole = Whole(urls, url, client, gateway)
            (replica,) = whole.ready()["replicas"].values()
            assert f"tcp://127.0.0.1:{port}" in replica["trust_reason"]
            assert "kv_events_bind is not set" in replica["trust_reason"]
    finally:
        gateway.end()
        dialer.end()


def asleep(whole: Whole) -> bool:
    return all(each["state"] == "sleeping" for each in whole.ready()["replicas"].values())


def matched(whole: Whole, text: str) -> int:
    return int(whole.chat(text).headers["x-kvroute-matched-tokens"])


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_is_credited_with_nothing_when_it_wakes(level: int) -> None:
    """It tells that its cache is gone with its first step only, which is too late for this one."""
    with whole_way(1) as whole:
        whole.chat(LONG)
        whole.holds(LONG, 64)
        (url,) = whole.replicas
        httpx.post(f"{url}/sleep?level={level}").raise_for_status()
        whole.wait(lambda: asleep(whole))
        httpx.post(f"{url}/wake_up").raise_for_status()
        whole.wait(lambda: not asleep(whole))
        assert matched(whole, LONG) == 0
        # Its first step has told: it is known exactly again, and holds what it has computed since.
        whole.wait_for_index("exact")
        whole.holds(LONG, 64)


def test_an_idle_engine_whose_cache_is_reset_is_believed_until_its_next_step() -> None:
    """Nothing on the wire or in its metrics tells before that step."""
    with whole_way(1) as whole:
        whole.chat(LONG)
        whole.holds(LONG, 64)
        (url,) = whole.replicas
        httpx.post(f"{url}/reset_prefix_cache").raise_for_status()
        whole.chat("Something else altogether.")
        whole.wait(lambda: 'event="cleared"} 1.0' in whole.client.get("/metrics").text)
        assert matched(whole, LONG) == 0
        whole.holds(LONG, 64)
