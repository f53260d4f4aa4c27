"""The rendered charts: lint, the properties that every pod shares, and helm 3, which clusters still use."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.charts.rendering import (
    GATEWAY,
    MODEL_SERVER,
    VALUE_SETS,
    Helm,
    ValueSet,
    containers,
    of_kind,
    pod_of,
    pod_specs,
)
from tests.cluster_env import environment

pytestmark = pytest.mark.cluster

MADE_ANEW: Final = re.compile(r"(password: |checksum/password: |tls\.(?:crt|key): ).*")
BY_NAME = pytest.mark.parametrize("wanted", VALUE_SETS, ids=lambda each: each.name)


@BY_NAME
def test_helm_lint_has_no_complaint(helm: Helm, wanted: ValueSet, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(dict(wanted.values)))
    assert "[INFO]" not in helm.run("lint", "--strict", wanted.chart, "--values", values)


@BY_NAME
def test_no_container_has_more_rights_than_it_needs(helm: Helm, wanted: ValueSet) -> None:
    for name, spec in pod_specs(helm.render_set(wanted)):
        of_vllm = wanted.name in ("servers-vllm", "servers-multi-node")
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(spec):
            where = f"{name}/{container['name']}"
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, where
            assert security["capabilities"] == {"drop": ["ALL"]}, where
            assert container["resources"]["requests"], where
            assert container["resources"]["limits"], where
            if of_vllm and container["name"] == "server":
                assert "runAsUser" not in security, where
                continue  # the image is not ours, and it may write to more folders than its caches
            assert security["readOnlyRootFilesystem"] is True, where
            assert {**spec["securityContext"], **security}["runAsNonRoot"] is True, where
            assert {**spec["securityContext"], **security}["runAsUser"] > 0, where


@BY_NAME
def test_only_the_picker_gets_a_token_of_the_cluster(helm: Helm, wanted: ValueSet) -> None:
    for name, spec in pod_specs(helm.render_set(wanted)):
        assert spec["automountServiceAccountToken"] is False, name
        tokens = {
            volume["name"]
            for volume in spec.get("volumes", ())
            for source in volume.get("projected", {}).get("sources", ())
            if "serviceAccountToken" in source
        }
        holders = [
            container["name"]
            for container in containers(spec)
            if tokens & {mount["name"] for mount in container.get("volumeMounts", ())}
        ]
        of_gateway = name == "gateway-prefix-gateway"
        assert holders == (["picker"] if of_gateway else []), name
        assert not of_gateway or spec["serviceAccountName"] == name


@BY_NAME
def test_ports_and_volumes_that_are_named_exist(helm: Helm, wanted: ValueSet) -> None:
    objects = helm.render_set(wanted)
    for name, spec in pod_specs(objects):
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        for container in containers(spec):
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for action in container.get(probe, {}).values():
                    if isinstance(action, dict) and "command" not in action:
                        assert action["port"] in ports, f"{name}: {probe}"
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in volumes, name
    selected = [
        (
            labels,
            {
                port["name"]
                for c in containers(each["spec"]["template"]["spec"])
                for port in c.get("ports", ())
            },
        )
        for each in objects
        if each["kind"] == "Deployment" and (labels := each["spec"]["template"]["metadata"]["labels"])
    ]
    for service in (each for each in objects if each["kind"] == "Service"):
        if service["metadata"]["name"].endswith("-servers"):
            continue  # this Service belongs to the model servers, which another chart makes
        selector = service["spec"]["selector"].items()
        ports = set().union(*(ports for labels, ports in selected if selector <= labels.items()))
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, service["metadata"]["name"]


def test_the_picker_outlives_envoy_and_both_the_longest_answer(helm: Helm) -> None:
    objects = helm.render(GATEWAY, {"longestAnswerSeconds": 1200, "drain": {"settleSeconds": 10}})
    spec = pod_of(objects)
    (envoy,) = spec["containers"]
    config_maker, picker = spec["initContainers"]
    assert envoy["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["10", "1210"]
    assert spec["terminationGracePeriodSeconds"] >= 1210 + 10, "time is left for both processes to end"
    assert picker["restartPolicy"] == "Always", "a sidecar: started before Envoy, stopped after it"
    assert "restartPolicy" not in config_maker, "done before the picker starts"


def test_changed_configuration_restarts_pods_and_changed_policy_does_not(helm: Helm) -> None:
    def checksum(values: dict[str, Any]) -> str:
        deployment = of_kind(helm.render(GATEWAY, values), "Deployment", "gateway-prefix-gateway")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum({"policy": {"rule": "affinity"}, "config": None, "podLabels": None}) == checksum({})
    assert checksum({"config": {"log": {"level": "debug"}}}) != checksum({})


def test_model_servers_let_the_pods_of_the_gateway_in_without_a_value(helm: Helm) -> None:
    allowed = of_kind(helm.render(MODEL_SERVER), "NetworkPolicy")["spec"]["ingress"][0]["from"][0]
    gateway_pods = of_kind(helm.render(GATEWAY), "Deployment", "gateway-prefix-gateway")["spec"]["template"]
    assert allowed["podSelector"]["matchLabels"].items() <= gateway_pods["metadata"]["labels"].items()


def test_each_rendering_makes_secrets_except_where_they_are_named(helm: Helm) -> None:
    """docs/upgrade.md says this to people whose tools only render."""

    def made(values: Mapping[str, Any]) -> list[Any]:
        return [o for o in helm.render(GATEWAY, values) if o["kind"] == "Secret"]

    gateway = {"shape": "gateway"}
    first, second = made(gateway), made(gateway)
    assert [s["metadata"]["name"] for s in first] == [s["metadata"]["name"] for s in second]
    assert len(first) == 2
    assert not any(one == other for one, other in zip(first, second, strict=True))
    named = {
        "gateway": {"tls": {"secretName": "mine"}},
        "sharing": {"url": "redis://r:6379", "existingSecret": "s"},
    }
    assert made(gateway | named) == []


@pytest.mark.parametrize(
    ("gateway", "peers"),
    [
        ({}, ["llm"]),
        ({"httpRoute": {"parentRefs": [{"name": "g", "namespace": "edge"}, {"name": "h"}]}}, ["edge", "llm"]),
        (
            {"provider": "ai-gateway", "httpRoute": {"parentRefs": [{"name": "g", "namespace": "edge"}]}},
            ["edge", "envoy-gateway-system"],
        ),
        ({"tls": {"secretName": "s", "requireClientCertificate": True}}, {"namespaceSelector": {}}),
        ({"from": [{"namespaceSelector": {}}]}, {"namespaceSelector": {}}),
        ({"from": [{"podSelector": {}}]}, {"podSelector": {}}),
    ],
)
def test_the_picker_of_a_gateway_is_open_to_the_gateways_namespaces(
    helm: Helm, gateway: dict[str, Any], peers: list[str] | dict[str, Any]
) -> None:
    objects = helm.render(GATEWAY, {"shape": "gateway", "gateway": gateway})
    rules = of_kind(objects, "NetworkPolicy", "gateway-prefix-gateway")["spec"]["ingress"]
    ((peer,),) = [rule["from"] for rule in rules if {"port": 9002} in rule["ports"]]
    if isinstance(peers, list):
        (names,) = peer["namespaceSelector"]["matchExpressions"]
        assert names == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": peers}
    else:
        assert peer == peers


def test_clients_that_are_named_do_not_shut_out_helm_test_and_load_test(helm: Helm) -> None:
    clients = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    load = {"enabled": True, "image": {"repository": "load"}}
    objects = helm.render(GATEWAY, {"networkPolicy": {"clients": clients}, "loadTest": load})
    rules = of_kind(objects, "NetworkPolicy", "gateway-prefix-gateway")["spec"]["ingress"]
    (peers,) = [rule["from"] for rule in rules if rule["ports"] == [{"port": 8080}]]
    assert peers[0] == clients[0]
    admitted = [peer["podSelector"]["matchLabels"].items() for peer in peers[1:]]
    job = of_kind(objects, "Job")["spec"]["template"]["metadata"]["labels"]
    for labels in (of_kind(objects, "Pod")["metadata"]["labels"], job):
        assert sum(wanted <= labels.items() for wanted in admitted) == 1
    gateway = of_kind(objects, "Deployment", "gateway-prefix-gateway")["spec"]["template"]["metadata"]
    assert not any(wanted <= gateway["labels"].items() for wanted in admitted)


@pytest.fixture(scope="session")
def helm3(helm: Helm) -> Helm:
    """Return helm 3. The fixture asks for `helm` first, so the test is skipped if the cluster's tools are
    missing.
    """
    found = Helm(environment.helm3(progress=print))
    assert found.run("version", "--short").startswith("v3.")
    assert helm.run("version", "--short").startswith("v4.")
    return found


@BY_NAME
def test_both_helms_make_the_same_objects(helm: Helm, helm3: Helm, wanted: ValueSet) -> None:
    texts = [
        sorted(MADE_ANEW.sub(r"\1", part).strip() for part in text.split("\n---\n"))
        for text in (each.text(wanted.chart, wanted.values, release=wanted.release) for each in (helm, helm3))
    ]
    assert texts[0] == texts[1]
