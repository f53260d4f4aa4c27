"""The rendered charts: snapshots for people to read, lint, and the properties that every pod shares.
CHART_SNAPSHOTS_REWRITE=1 writes the snapshots anew. Read the diff afterwards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

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
    pod_specs,
    value_set,
)

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster

USUAL = {
    "gateway-production": "gateway-default",
    "gateway-shape": "gateway-default",
    "gateway-envoy-gateway": "gateway-shape",
    "gateway-istio": "gateway-shape",
    "servers-kv-store": "servers-simulated",
}
"""The sets that are shown as changes, each with the set that it is compared with."""
SHOWN = [each for each in VALUE_SETS if each.name != "servers-multi-node"]
"""The sets that have a snapshot. `test_multi_node` has what is special about servers of several nodes."""
SNAPSHOTS = Path(__file__).parent / "snapshots"
BY_NAME = pytest.mark.parametrize("wanted", VALUE_SETS, ids=lambda each: each.name)
RANDOM = re.compile(r"(\bpassword: )[A-Za-z0-9]{32}\b")


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Blocks.add_representer(
    str, lambda d, t: d.represent_scalar("tag:yaml.org,2002:str", t, style="|" if "\n" in t else None)
)


def readable(manifest: dict[str, Any]) -> str:
    """Return an object without the parts that are the same in every object, and without the text of files
    that lie in the chart.
    """
    manifest["metadata"].pop("labels", None)
    manifest["metadata"].pop("namespace", None)
    if manifest["kind"] == "CustomResourceDefinition":
        manifest = {"kind": manifest["kind"], "metadata": {"name": manifest["metadata"]["name"]}}
    for name in manifest.get("data", {}):
        if name.endswith((".sh", ".py", ".json")):
            manifest["data"][name] = f"(files/{name})"
    if manifest["kind"] == "PrometheusRule":
        manifest["spec"]["groups"] = "(files/alerts.yaml)"
    if manifest["kind"] == "Pod":
        manifest["spec"]["containers"][0]["args"] = ["(files/smoke.py)"]
    text: str = yaml.dump(manifest, Dumper=_Blocks, sort_keys=False, width=130)
    return re.sub(r"(checksum/\w+: ).*", r"\1(sha256)", RANDOM.sub(r"\1(random)", text))


def named(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def objects(helm: Helm, wanted: ValueSet) -> dict[str, str]:
    return {named(each): readable(each) for each in helm.render_set(wanted)}


def snapshot(helm: Helm, wanted: ValueSet) -> str:
    """Return all objects, or the lines that differ from those of the usual set."""
    found = objects(helm, wanted)
    if wanted.name not in USUAL:
        return "---\n".join(found.values())
    usual = objects(helm, value_set(USUAL[wanted.name]))
    lines = [f"# {len(found)} objects, compared with {USUAL[wanted.name]}"]
    for name in sorted(usual.keys() | found.keys()):
        before, after = usual.get(name, "").splitlines(), found.get(name, "").splitlines()
        changes = list(unified_diff(before, after, lineterm="", n=0))[2:]
        shown = [line for line in changes if not line.startswith("@@")]
        if shown:
            lines += [f"# {name}", *(shown if after else ["# is missing"])]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("wanted", SHOWN, ids=lambda each: each.name)
def test_the_rendered_chart_equals_its_snapshot(helm: Helm, wanted: ValueSet) -> None:
    found = snapshot(helm, wanted)
    path = SNAPSHOTS / f"{wanted.name}.{'diff' if wanted.name in USUAL else 'yaml'}"
    if os.environ.get("CHART_SNAPSHOTS_REWRITE") == "1":
        path.write_text(found)
    assert found == path.read_text()


@BY_NAME
def test_helm_lint_has_no_complaint(helm: Helm, wanted: ValueSet, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(dict(wanted.values)))
    helm.run("lint", "--strict", wanted.chart, "--values", values)


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
    spec = of_kind(objects, "Deployment", "gateway-prefix-gateway")["spec"]["template"]["spec"]
    (envoy,) = spec["containers"]
    config_maker, picker = spec["initContainers"]
    assert envoy["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["10", "1210"]
    assert spec["terminationGracePeriodSeconds"] >= 1210 + 10, "time is left for both processes to end"
    assert picker["restartPolicy"] == "Always", "a sidecar: started before Envoy, stopped after it"
    assert "restartPolicy" not in config_maker, "done before the picker starts"


def test_a_changed_configuration_restarts_the_pods_and_a_changed_policy_does_not(helm: Helm) -> None:
    def checksum(values: dict[str, Any]) -> str:
        deployment = of_kind(helm.render(GATEWAY, values), "Deployment", "gateway-prefix-gateway")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum({"policy": {"rule": "affinity"}}) == checksum({})
    assert checksum({"config": {"log": {"level": "debug"}}}) != checksum({})


def test_the_replica_count_is_left_to_an_autoscaler_that_is_on(helm: Helm) -> None:
    scaled = of_kind(helm.render(GATEWAY), "Deployment", "gateway-prefix-gateway")
    assert "replicas" not in scaled["spec"], "helm upgrade would undo the autoscaler's work"
    fixed = helm.render(GATEWAY, {"autoscaling": {"enabled": False}, "replicas": 5})
    assert of_kind(fixed, "Deployment", "gateway-prefix-gateway")["spec"]["replicas"] == 5
    assert not [each for each in fixed if each["kind"] == "HorizontalPodAutoscaler"]


def test_the_two_charts_find_each_other_without_a_value(helm: Helm) -> None:
    pods = of_kind(helm.render_set(value_set("servers-simulated")), "Deployment")["spec"]["template"]
    config = yaml.safe_load(
        of_kind(helm.render(GATEWAY), "ConfigMap", "gateway-prefix-gateway-config")["data"]["config.yaml"]
    )
    followed = config["kubernetes"]
    assert followed["selector"].items() <= pods["metadata"]["labels"].items()
    (server,) = pods["spec"]["containers"]
    assert followed["targetPorts"] == [port["containerPort"] for port in server["ports"]]
    allowed = of_kind(helm.render(MODEL_SERVER), "NetworkPolicy")["spec"]["ingress"][0]["from"][0]
    gateway_pods = of_kind(helm.render(GATEWAY), "Deployment", "gateway-prefix-gateway")["spec"]["template"]
    assert allowed["podSelector"]["matchLabels"].items() <= gateway_pods["metadata"]["labels"].items()


def test_replicas_share_one_table_unless_the_values_forbid_it(helm: Helm) -> None:
    objects = helm.render(GATEWAY)
    config = yaml.safe_load(
        of_kind(objects, "ConfigMap", "gateway-prefix-gateway-config")["data"]["config.yaml"]
    )
    service = of_kind(objects, "Service", "gateway-prefix-gateway-valkey")
    assert config["sharing"]["redis"]["url"] == f"redis://{service['metadata']['name']}:6379/0"
    without = helm.render(GATEWAY, {"sharing": {"enabled": False}})
    assert not [each for each in without if each["metadata"]["name"].endswith("-valkey")]


def test_without_a_cluster_each_rendering_makes_secrets_of_its_own_and_none_where_they_are_named(
    helm: Helm,
) -> None:
    """docs/kubernetes.md says this to people whose tools only render."""

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


def test_clients_that_are_named_do_not_shut_out_helm_test_and_the_load_test(helm: Helm) -> None:
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
