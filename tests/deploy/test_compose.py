"""compose.yaml: the Compose schema, and that its parts fit together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from router.config import Settings, load_settings

SCHEMA = ("--builtin-schema", "vendor.compose-spec")


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((root / "deploy/compose.yaml").read_text())
    return loaded


@pytest.fixture
def settings(
    compose: dict[str, Any], clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    for name, value in compose["services"]["gateway"]["environment"].items():
        monkeypatch.setenv(name, value)
    return load_settings()


def seconds(duration: str) -> int:
    amount, unit = re.fullmatch(r"(\d+)([sm])", duration).groups()  # type: ignore[union-attr]
    return int(amount) * {"s": 1, "m": 60}[unit]


def engine_options(service: dict[str, Any]) -> dict[str, Any]:
    command = service["command"]
    parsed: dict[str, Any] = json.loads(command[command.index("--kv-events-config") + 1])
    return parsed


def test_it_follows_the_compose_schema(run_tool: Any) -> None:
    result = run_tool("check-jsonschema", *SCHEMA, "deploy/compose.yaml")
    assert result.returncode == 0, result.stdout


def test_the_schema_finds_a_misspelt_key(
    run_tool: Any, compose: dict[str, Any], tmp_path: Path
) -> None:
    compose = json.loads(json.dumps(compose))
    compose["services"]["gateway"]["helthcheck"] = {}
    bad = tmp_path / "compose.yaml"
    bad.write_text(yaml.safe_dump(compose))
    result = run_tool("check-jsonschema", *SCHEMA, bad)
    assert result.returncode != 0
    assert "helthcheck" in result.stdout


def test_the_gateway_reaches_every_address_it_is_given(
    compose: dict[str, Any], settings: Settings
) -> None:
    services = compose["services"]
    urls = [replica.url for replica in settings.replicas]
    assert settings.redis_url
    for url in [*urls, settings.redis_url]:
        host = urlsplit(url).hostname
        assert set(services[host]["networks"]) & set(services["gateway"]["networks"]), url
    engines = {name for name in services if name.startswith("engine-")}
    assert {urlsplit(url).hostname for url in urls} == engines


def test_the_published_port_is_the_gateway_s(compose: dict[str, Any], settings: Settings) -> None:
    [port] = compose["services"]["gateway"]["ports"]
    assert port == f"127.0.0.1:{settings.port}:{settings.port}"


def test_the_gateway_may_finish_its_running_answers(
    compose: dict[str, Any], settings: Settings
) -> None:
    grace_s = seconds(compose["services"]["gateway"]["stop_grace_period"])
    assert grace_s >= settings.drain_s + 10


def test_engines_publish_kv_events_and_listen_where_they_are_expected(
    compose: dict[str, Any], settings: Settings
) -> None:
    for replica in settings.replicas:
        parts = urlsplit(replica.url)
        service = compose["services"][parts.hostname]
        assert engine_options(service) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558",
        }
        assert f"--port={parts.port}" in service["command"]


def test_only_the_gateway_shares_a_network_with_engines_and_index(
    compose: dict[str, Any],
) -> None:
    """KV events carry prompts; index and engines have no authentication."""
    services = compose["services"]
    assert compose["networks"]["index"]["internal"] is True
    in_index = {name for name, service in services.items() if "index" in service["networks"]}
    assert in_index == {"gateway", "index"}
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]


def test_every_service_restarts_and_drops_its_privileges(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_every_engine_has_its_own_gpu(compose: dict[str, Any]) -> None:
    devices = [
        tuple(service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"])
        for name, service in compose["services"].items()
        if name.startswith("engine-")
    ]
    assert len(devices) == len(set(devices)) == 2


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_engine_s_health_check_asks_health(
    compose: dict[str, Any], serve_status: Any, status: int, healthy: bool
) -> None:
    kind, _, *args = compose["services"]["engine-0"]["healthcheck"]["test"]
    assert kind == "CMD"
    with serve_status(status) as port:
        result = subprocess.run(
            [sys.executable, args[0], args[1].replace(":8000/", f":{port}/")],
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
    assert (result.returncode == 0) is healthy


def test_images_are_the_ones_of_the_manifests(compose: dict[str, Any], root: Path) -> None:
    files = (root / "deploy/kustomize").rglob("*.yaml")
    named = set(re.findall(r"^ +image: (\S+)$", "".join(f.read_text() for f in files), re.M))
    assert {service["image"] for service in compose["services"].values()} == named
