"""The manifests as `kubectl kustomize` renders them: schemas, and that the parts fit together."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from router.config import Settings, load_settings

# `preStop.sleep` needs the first; the second is the newest whose schemas are at hand.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
RENDERED = ("base", "overlays/example")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    documents: list[Manifest]

    def of(self, kind: str) -> dict[str, Manifest]:
        return {d["metadata"]["name"]: d for d in self.documents if d["kind"] == kind}

    def workloads(self) -> dict[str, Manifest]:
        return self.of("Deployment") | self.of("StatefulSet")

    def templates(self) -> dict[str, Manifest]:
        return {name: w["spec"]["template"] for name, w in self.workloads().items()}

    def selected(self, labels: dict[str, str]) -> list[Manifest]:
        """Pod templates that carry all of the labels."""
        return [
            template
            for template in self.templates().values()
            if labels.items() <= template["metadata"]["labels"].items()
        ]


@pytest.fixture(scope="module", params=RENDERED)
def rendered(request: pytest.FixtureRequest, run_tool: Any) -> Rendered:
    return render(run_tool, request.param)


@pytest.fixture(scope="module")
def example(run_tool: Any) -> Rendered:
    return render(run_tool, "overlays/example")


def render(run_tool: Any, folder: str) -> Rendered:
    result = run_tool("kubectl", "kustomize", f"deploy/kustomize/{folder}")
    assert result.returncode == 0, result.stderr
    return Rendered(list(yaml.safe_load_all(result.stdout)))


def gateway_settings(rendered: Rendered, folder: Path) -> Settings:
    """The mounted configuration, read by the gateway's own model from the path it is given."""
    template = rendered.templates()["kvroute"]["spec"]
    [volume] = [v for v in template["volumes"] if "configMap" in v]
    config = rendered.of("ConfigMap")[volume["configMap"]["name"]]
    [container] = template["containers"]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    path = Path(container["args"][container["args"].index("--config") + 1])
    assert str(path.parent) == mount["mountPath"]
    file = folder / path.name
    file.write_text(config["data"][path.name])
    return load_settings(file)


@pytest.fixture
def settings(rendered: Rendered, tmp_path: Path, clean_environment: None) -> Settings:
    return gateway_settings(rendered, tmp_path)


@pytest.fixture
def example_settings(example: Rendered, tmp_path: Path, clean_environment: None) -> Settings:
    return gateway_settings(example, tmp_path)


def container_of(template: Manifest) -> Manifest:
    [container] = template["spec"]["containers"]
    found: Manifest = container
    return found


def port_names(template: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(template)["ports"]}


def probes(container: Manifest) -> Iterator[tuple[str, Manifest]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield name, container[name]


def mib(quantity: str) -> float:
    amount, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(amount) * {"Mi": 1, "Gi": 1024}[unit]


# --- schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_strictly_valid(rendered: Rendered, version: str) -> None:
    for document in rendered.documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_validation_finds_wrong_types_and_unknown_fields(example: Rendered, version: str) -> None:
    deployment = example.of("Deployment")["kvroute"]
    for key, value in (("replicas", "two"), ("replica", 2)):
        bad = copy.deepcopy(deployment)
        bad["spec"][key] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(bad, version, strict=True)


# --- pods


def test_pods_meet_the_restricted_pod_security_standard(rendered: Rendered) -> None:
    for name, template in rendered.templates().items():
        pod, container = template["spec"], container_of(template)
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            assert forbidden not in pod, name
        assert not [v for v in pod["volumes"] if "hostPath" in v], name
        assert not [p for p in container["ports"] if "hostPort" in p], name


def test_our_pods_have_a_read_only_root_and_no_token(rendered: Rendered) -> None:
    for name in ("kvroute", "kvroute-index"):
        template = rendered.templates()[name]
        assert container_of(template)["securityContext"]["readOnlyRootFilesystem"] is True
        assert template["spec"]["automountServiceAccountToken"] is False


def test_no_pod_gets_variables_named_after_services(rendered: Rendered) -> None:
    """KVROUTE_PORT=tcp://10.0.0.1:80 would be read as the gateway's own port."""
    assert all(t["spec"]["enableServiceLinks"] is False for t in rendered.templates().values())


def test_pods_have_bounded_memory_and_every_probe(rendered: Rendered) -> None:
    for template in rendered.templates().values():
        container = container_of(template)
        resources = container["resources"]
        assert mib(resources["requests"]["memory"]) <= mib(resources["limits"]["memory"])
        names = port_names(template)
        for probe_name, probe in probes(container):
            action = probe.get("httpGet") or probe.get("tcpSocket")
            assert action is None or action["port"] in names, probe_name
            assert action or probe["exec"], probe_name


def test_gateway_probes_ask_the_right_questions(rendered: Rendered) -> None:
    container = container_of(rendered.templates()["kvroute"])
    paths = {name: probe["httpGet"]["path"] for name, probe in probes(container)}
    assert paths == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }


# --- selectors and ports


def test_services_select_pods_and_their_ports(rendered: Rendered) -> None:
    for name, service in rendered.of("Service").items():
        templates = rendered.selected(service["spec"]["selector"])
        assert len(templates) == 1, name
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in port_names(templates[0]), name


def test_workloads_select_their_own_pods_only(rendered: Rendered) -> None:
    for name, workload in rendered.workloads().items():
        template = workload["spec"]["template"]
        assert rendered.selected(workload["spec"]["selector"]["matchLabels"]) == [template], name


def test_stateful_sets_have_their_service(rendered: Rendered) -> None:
    for workload in rendered.of("StatefulSet").values():
        assert workload["spec"]["serviceName"] in rendered.of("Service")


def test_the_disruption_budget_never_blocks_a_drain(rendered: Rendered) -> None:
    budget = rendered.of("PodDisruptionBudget")["kvroute"]["spec"]
    assert rendered.selected(budget["selector"]["matchLabels"]) == [rendered.templates()["kvroute"]]
    assert budget["maxUnavailable"] == 1


# --- network policies


def admits(rules: list[Manifest], peer: Manifest, port: int, names: dict[str, int]) -> bool:
    """Whether some rule lets `peer` (a pod template) and this port through."""
    return any(
        _peer_matches(rule, peer)
        and port in [names.get(p["port"], p["port"]) for p in rule["ports"]]
        for rule in rules
    )


def _peer_matches(rule: Manifest, peer: Manifest) -> bool:
    peers = rule.get("from", rule.get("to"))
    labels = peer["metadata"]["labels"].items()
    return peers is None or any(p["podSelector"]["matchLabels"].items() <= labels for p in peers)


def test_every_connection_of_the_gateway_is_admitted_on_both_sides(example: Rendered) -> None:
    policies, templates = example.of("NetworkPolicy"), example.templates()
    gateway = templates["kvroute"]
    out = policies["kvroute"]["spec"]["egress"]
    for name in ("kvroute-index", "engine"):
        ports = port_names(templates[name])
        into = policies[name]["spec"]["ingress"]
        for port in ports.values():
            assert admits(out, templates[name], port, ports), (name, port)
            assert admits(into, gateway, port, ports), (name, port)


def test_nobody_else_reaches_engines_or_index(example: Rendered) -> None:
    policies, templates = example.of("NetworkPolicy"), example.templates()
    strangers = [templates["engine"], {"metadata": {"labels": {"app": "other"}}}]
    for name in ("kvroute-index", "engine"):
        ports = port_names(templates[name])
        for port in ports.values():
            for stranger in strangers:
                assert not admits(policies[name]["spec"]["ingress"], stranger, port, ports)


def test_policies_apply_to_exactly_one_workload(rendered: Rendered) -> None:
    for name, policy in rendered.of("NetworkPolicy").items():
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert rendered.selected(labels) == [rendered.templates()[name]]


# --- the gateway's configuration


def test_the_configured_port_is_the_container_s(rendered: Rendered, settings: Settings) -> None:
    assert port_names(rendered.templates()["kvroute"])["http"] == settings.port


def test_a_pod_ends_after_its_running_answers(rendered: Rendered, settings: Settings) -> None:
    spec = rendered.templates()["kvroute"]["spec"]
    pause_s = container_of({"spec": spec})["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= pause_s + settings.drain_s + 10


def test_the_index_is_found_under_its_service(rendered: Rendered, settings: Settings) -> None:
    assert settings.redis_url
    parts = urlsplit(settings.redis_url)
    service = rendered.of("Service")[parts.hostname or ""]
    assert [port["port"] for port in service["spec"]["ports"]] == [parts.port]


def test_a_changed_configuration_rolls_the_gateways(rendered: Rendered) -> None:
    [name] = rendered.of("ConfigMap")
    assert re.fullmatch(r"kvroute-config-[a-z0-9]{10}", name)


def test_replicas_are_the_pods_of_the_engines(
    example: Rendered, example_settings: Settings
) -> None:
    engine = example.of("StatefulSet")["engine"]["spec"]
    service = example.of("Service")[engine["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    pods = [f"engine-{n}.{engine['serviceName']}" for n in range(engine["replicas"])]
    assert [urlsplit(r.url).hostname for r in example_settings.replicas] == pods
    assert {urlsplit(r.url).port for r in example_settings.replicas} == {8000}


def test_kv_events_are_subscribed_where_they_are_published(
    example: Rendered, example_settings: Settings
) -> None:
    args = container_of(example.templates()["engine"])["args"]
    published = json.loads(args[args.index("--kv-events-config") + 1])
    assert published["enable_kv_cache_events"] is True
    assert published["publisher"] == "zmq"
    ports = port_names(example.templates()["engine"])
    assert published["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert published["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
    for replica in example_settings.replicas:
        host = urlsplit(replica.url).hostname or ""
        [source] = replica.kv_events or []
        assert source.endpoint == published["endpoint"].replace("*", host)
        assert source.replay_endpoint == published["replay_endpoint"].replace("*", host)
        assert source.topic == published.get("topic", "")


def test_the_image_is_of_this_version(rendered: Rendered, project: dict[str, Any]) -> None:
    image = container_of(rendered.templates()["kvroute"])["image"]
    assert image == f"kvroute:{project['project']['version']}"
