"""Settings: where they come from, who wins, and that errors name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import Settings, load_settings
from router.errors import ConfigError

REPLICA = [{"url": "http://a:8000"}]


def test_flags_win_over_environment_over_yaml_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvroute.yaml"
    path.write_text("port: 1\npolicy: random\nhost: 0.0.0.0\nreplicas: [{url: 'http://y:1/'}]\n")
    monkeypatch.setenv("KVROUTE_PORT", "2")
    monkeypatch.setenv("KVROUTE_POLICY", "least_load")
    settings = load_settings(path, port=3, host=None)
    assert (settings.port, settings.policy, settings.host) == (3, "least_load", "0.0.0.0")
    assert (settings.replicas[0].url, settings.replicas[0].name) == ("http://y:1", "y:1")
    assert settings.drain_s == 30.0


def test_replicas_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_REPLICAS", '[{"url": "http://e:1", "name": "east"}]')
    assert [each.name for each in load_settings().replicas] == ["east"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, "replicas: none given"),
        ({"replicas": REPLICA, "policy": "best"}, "policy: Input should be 'cost'"),
        ({"replicas": REPLICA, "port": 70000}, "port: "),
        ({"replicas": REPLICA, "prot": 1}, "prot: .*no such setting"),
        ({"replicas": [{"url": "a:8000"}]}, "replicas.0.url: 'a:8000' is not a base URL"),
        ({"replicas": [{"url": "http://a:x"}]}, "replicas.0.url: "),
        ({"replicas": ["http://a b:1"]}, "replicas.0.url: 'http://a b:1' has characters"),
        ({"replicas": ["http://a:1/b c"]}, "replicas.0.url: 'http://a:1/b c' has characters"),
        ({"replicas": ["http://a\x0b:1"]}, "has characters that no header can carry"),
        ({"replicas": ["http://a..b:1"]}, "replicas.0.url: 'a..b' is no host name"),
        ({"replicas": [f"http://{'a' * 64}:1"]}, "is no host name"),
        (
            {"replicas": [{"url": "http://a", "kv_events": [{"rank": -1}]}]},
            "replicas.0.kv_events.0.rank",
        ),
        ({"replicas": [{"url": "https://a"}]}, "replicas.0.url: TLS to replicas"),
        ({"replicas": ["http://a:1/v1/"]}, "replicas.0.url: leave out the /v1"),
        (
            {"replicas": [{"url": "http://a", "kv_events": [{"endpoint": "a:5557"}]}]},
            "replicas.0.kv_events: 'a:5557' is not a ZMQ address",
        ),
        ({"replicas": REPLICA, "replica_api_key": "two words"}, "replica_api_key: a token is"),
        ({"replicas": [{**REPLICA[0], "api_key": "a\r\nb"}]}, "replicas.0.api_key: a token is"),
        (
            {"replicas": REPLICA, "replica_api_key_file": "/nowhere/key"},
            "replica_api_key_file: /no",
        ),
        ({"replicas": REPLICA, "retry_statuses": [200]}, "retry_statuses: 200"),
        ({"replicas": REPLICA, "retry_budget": 7}, "retry_budget: "),
        ({"replicas": REPLICA, "redis_url": "http://a"}, "redis_url: "),
        ({"replicas": REPLICA, "redis_url": "redis://a:99999999"}, "redis_url: "),
        ({"replicas": REPLICA, "model_aliases": {"a": "b", "b": "c"}}, "model_aliases: 'a'"),
        ({"replicas": REPLICA * 2}, "replicas: the name 'a:8000' is used more than once"),
        (
            {"replicas": [{"url": "http://a:1", "name": each} for each in "xy"]},
            "replicas: http://a:1 is given more than once",
        ),
    ],
)
def test_errors_name_the_field(flags: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        load_settings(**flags)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_a_yaml_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_settings(path)


def test_a_missing_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml")


def test_an_environment_value_that_is_not_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_REPLICAS", "[{")
    with pytest.raises(ConfigError, match="replicas"):
        load_settings()


def test_every_setting_is_in_the_readme() -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text("utf-8")
    missing = [name for name in Settings.model_fields if f"`{name}`" not in readme]
    assert missing == []


def test_every_setting_says_what_it_is() -> None:
    assert [n for n, field in Settings.model_fields.items() if not field.description] == []


def test_a_url_alone_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_REPLICAS", '["http://e:1", {"url": "http://f:2", "name": "f"}]')
    assert [each.name for each in load_settings().replicas] == ["e:1", "f"]


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_admin_token_is_none(token: str) -> None:
    assert load_settings(replicas=REPLICA, admin_token=token).admin_token is None


def test_a_mistyped_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVROUTE_POLCY", "cost")
    load_settings(replicas=REPLICA)
    assert "KVROUTE_POLCY is set, but there is no such setting" in caplog.text
