"""From publishers to sources: where we connect, where we are dialed, and what to say if not."""

from __future__ import annotations

from typing import Any

import pytest

from cache_index.identity import ModelIdentity
from cache_index.types import SourceSpec
from router.config import KvEventsConfig, load_settings
from router.engines import listed_publishers
from router.errors import ConfigError
from router.publishers import Bound, Owner, source_specs

MODEL = ModelIdentity("m")
OWNER = Owner("gpu-7", "10.0.0.7", "10.0.0.7:8000")
BOUND = Bound("tcp://*:5557")


def listed(bound: Bound = BOUND, *, rank: int = 0, **entry: Any) -> SourceSpec:
    (spec,) = source_specs(OWNER, listed_publishers({str(rank): entry}), MODEL, bound)
    return spec


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::]:5557", "ipc:///tmp/kv"])
def test_what_listens_is_connected_to_whatever_we_bind(endpoint: str) -> None:
    spec = listed(endpoint=endpoint)
    assert not spec.dials
    assert spec.endpoint == endpoint.replace("*", "10.0.0.7").replace("[::]", "10.0.0.7")
    assert spec.hint == ""


@pytest.mark.parametrize(("rank", "port"), [(0, 5557), (3, 5560), (3, 5557)])
def test_what_dials_a_port_of_ours_is_heard_there(rank: int, port: int) -> None:
    spec = listed(
        rank=rank,
        endpoint=f"tcp://gateway:{port}",
        replay_endpoint="tcp://*:5657",
        topic="kv@gpu-7@m",
    )
    assert (spec.dials, spec.endpoint) == (True, f"tcp://*:{port}")
    assert (spec.topic, spec.names) == ("kv@gpu-7@m", ())
    assert spec.replay_endpoint == "tcp://10.0.0.7:5657"
    assert "'kv@gpu-7@m'" in spec.hint


def test_without_a_topic_the_replica_is_known_by_its_names() -> None:
    spec = listed(endpoint="tcp://gateway:5557")
    assert spec.names == ("gpu-7", "10.0.0.7:8000", "10.0.0.7")
    assert "'kv@gpu-7@MODEL'" in spec.hint


@pytest.mark.parametrize(
    ("bound", "said"),
    [(Bound(), "kv_events_bind is not set"), (Bound("tcp://*:6000"), "is tcp://*:6000")],
)
def test_what_dials_elsewhere_is_said_and_tried_all_the_same(bound: Bound, said: str) -> None:
    """A host in the endpoint can also be what `tcp://*:0` turned into, which listens."""
    spec = listed(bound, endpoint="tcp://10.0.0.7:41234")
    assert (spec.dials, spec.endpoint) == (False, "tcp://10.0.0.7:41234")
    assert said in spec.hint
    assert "tcp://10.0.0.7:41234" in spec.hint


def test_a_declared_address_is_connected_to_and_none_means_that_it_dials() -> None:
    publishers = [
        KvEventsConfig(rank=0, endpoint="tcp://10.0.0.7:5557"),
        KvEventsConfig(rank=1, topic="own"),
        KvEventsConfig(rank=2),
    ]
    there, named, unnamed = source_specs(OWNER, publishers, MODEL, BOUND, declared=True)
    assert (there.dials, there.endpoint, there.hint) == (False, "tcp://10.0.0.7:5557", "")
    assert (named.dials, named.endpoint, named.names) == (True, "tcp://*:5558", ())
    assert (unnamed.endpoint, unnamed.names[0]) == ("tcp://*:5559", "gpu-7")


def test_a_dialing_publisher_without_a_socket_of_ours_has_a_reason() -> None:
    (spec,) = source_specs(OWNER, [KvEventsConfig()], MODEL, Bound(), declared=True)
    assert (spec.dials, spec.endpoint) == (True, "")
    assert "kv_events_bind is not set" in spec.hint


@pytest.mark.parametrize("endpoint", ["tcp://h:x", "tcp://h:99999", "tcp://h", "inproc://a"])
def test_nonsense_is_nobodys_port(endpoint: str) -> None:
    assert BOUND.dialed(endpoint, 0) is None


def settings(**given: Any) -> Any:
    return load_settings(replicas=[{"url": "http://10.0.0.7:8000", **given.pop("of", {})}], **given)


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://[::]:5557", "ipc:///tmp/kv", ""])
def test_addresses_to_bind(address: str) -> None:
    assert settings(kv_events_bind=address).kv_events_bind == (address or None)


@pytest.mark.parametrize("address", ["5557", "*:5557", "tcp://*", "tcp://*:0", "http://a:1"])
def test_what_cannot_be_bound_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_bind"):
        settings(kv_events_bind=address)


def test_events_without_an_endpoint_need_a_socket_of_ours() -> None:
    with pytest.raises(ConfigError, match="set kv_events_bind"):
        settings(of={"kv_events": [{}]})
    assert settings(of={"kv_events": [{}]}, kv_events_bind="tcp://*:5557").replicas
