"""The charts against a real API server, which validates every object. The real helm installs, upgrades, rolls
back and uninstalls them.
"""

import contextlib
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.charts.rendering import GATEWAY, MODEL_SERVER
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace
from tests.harness.processes import wait_until

pytestmark = pytest.mark.cluster

OF_THE_CLUSTER = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
"""The objects that every namespace has."""


def values_file(directory: Path, values: Any) -> Path:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    return path


def listed(plane: ControlPlane, namespace: str) -> set[str]:
    """Return every object of the namespace as `kind/name`, without Events."""
    kinds = plane.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    kinds = [k for k in kinds if not k.startswith(("events", "pods.metrics"))]
    text = plane.kubectl(
        "get", ",".join(kinds), "--namespace", namespace, "--output=name", "--ignore-not-found"
    )
    return {re.sub(r"\..*?/", "/", line) for line in text.split()}


async def emptied(plane: ControlPlane, namespace: str) -> None:
    """Wait until nothing of a release is left, and show what is left if the wait fails. The garbage collector
    pauses while kinds come and go, because other tests share this control plane.
    """
    with contextlib.suppress(AssertionError):
        await wait_until(
            lambda: listed(plane, namespace) == OF_THE_CLUSTER, what="nothing is left", timeout_s=200
        )
    assert listed(plane, namespace) == OF_THE_CLUSTER


ENV: Final = [{"name": "A", "value": "b"}]
VOLUME: Final = {
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
}
OF_PODS: Final[dict[str, Any]] = {
    "imagePullSecrets": [{"name": "regcred"}],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "system-node-critical",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "commonLabels": {"team": "apps"},
    "podLabels": {"team": "chat"},
    "podAnnotations": {"a": "b"},
}
TAKEN_BACK: Final[dict[str, tuple[Path, dict[str, Any]]]] = {
    "gateway": (
        GATEWAY,
        {
            "service": {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "nodePort": 30080,
                "loadBalancerClass": "example.com/internal",
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
                "ipFamilyPolicy": "SingleStack",
                "ipFamilies": ["IPv4"],
                "annotations": {"a": "b"},
            },
            "tls": {"secretName": "clients"},
            "config": {"workers": 2},
            "models": {"apiKeySecret": "key"},
            "sharing": {"signingKeySecret": "key"},
            "valkey": {"existingSecret": "password"},
            "tracing": {"enabled": True, "endpoint": "http://collector:4317"},
            "envoy": {"extraEnv": ENV, **VOLUME},
            "picker": {"extraEnv": ENV},
            "serviceAccount": {"annotations": {"a": "b"}},
            "networkPolicy": {"clients": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
            **OF_PODS,
        },
    ),
    "servers": (
        MODEL_SERVER,
        {
            "engine": "vllm",
            "role": "prefill",
            "profile": {
                "blockSizeTokens": 16,
                "hashSeed": 0,
                "kvEvents": {},
                "lora": {"runtimeUpdates": True},
            },
            "loraSync": {"enabled": True},
            "vllm": {"huggingFaceSecret": "token", "cache": {"claimName": "models"}},
            "initContainers": [{"name": "load", "image": "loader"}],
            "extraEnv": ENV,
            "networkPolicy": {"from": [{"podSelector": {}}]},
            "serviceAccount": {"create": True, "annotations": {"a": "b"}},
            **VOLUME,
            **OF_PODS,
        },
    ),
    "store": (
        MODEL_SERVER,
        {
            "engine": "simulated",
            "simulated": {
                "args": ["--runner", "hf"],
                "kvStore": {"enabled": True, "sizeGB": 1, "ratio": 0.5, "claimName": "prefixes"},
            },
            "replicas": 1,
        },
    ),
}
"""By release: every value that makes the chart write a field which it leaves out without this value. The
count of replicas, which others set too, has tests of its own (`test_replica_counts`).
"""


@pytest.mark.parametrize("release", TAKEN_BACK)
def test_values_taken_back_leave_what_a_fresh_install_has(
    cluster: ControlPlane, namespace: str, tmp_path: Path, release: str
) -> None:
    chart, values = TAKEN_BACK[release]
    fresh = f"{namespace}-fresh"
    create_namespace(cluster, fresh)
    usual = ("--set", "replicas=0")
    everything = ("--values", values_file(tmp_path, values))
    cluster.helm("install", release, chart, "--namespace", namespace, *usual, *everything)
    cluster.helm("upgrade", release, chart, "--namespace", namespace, *usual)
    cluster.helm("install", release, chart, "--namespace", fresh, *usual)

    def found(where: str) -> dict[str, Any]:
        kinds = "deployment,service,networkpolicy,poddisruptionbudget,serviceaccount,role"
        items = cluster.get(kinds, "--namespace", where)["items"]
        texts = {f"{o['kind']}/{o['metadata']['name']}": compared(o) for o in items}
        same: dict[str, Any] = yaml.safe_load(yaml.safe_dump(texts).replace(where, "HERE"))
        return same

    assert found(namespace) == found(fresh)
    for each in (namespace, fresh):
        cluster.helm("uninstall", release, "--namespace", each)
    cluster.kubectl("delete", "namespace", fresh, "--wait=false")


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object without what the API server chose, and without the chart's passwords."""
    head = {key: found["metadata"].get(key) for key in ("labels", "annotations")}
    (head["annotations"] or {}).pop("deployment.kubernetes.io/revision", None)
    spec = {k: v for k, v in found.get("spec", {}).items() if k not in {"clusterIP", "clusterIPs"}}
    made_anew = spec.get("template", {}).get("metadata", {}).get("annotations", {})
    for key in [key for key in made_anew if key.startswith("checksum/")]:
        del made_anew[key]
    return {"metadata": head, "spec": spec, "rules": found.get("rules")}


async def test_secrets_that_the_chart_made_outlive_upgrade_and_rollback(
    cluster_with_addons: ControlPlane, namespace: str
) -> None:
    plane, where = cluster_with_addons, ("--namespace", namespace)

    def secrets() -> list[Any]:
        names = ("gateway-prefix-gateway-picker-tls", "gateway-prefix-gateway-valkey")
        return [plane.get(f"secret/{name}", *where)["data"] for name in names]

    flags = ("--set", "shape=gateway,autoscaling.enabled=true")
    assert "no metrics.k8s.io" in plane.helm("install", "gateway", GATEWAY, *where, *flags)
    made = secrets()
    plane.helm("upgrade", "gateway", GATEWAY, *where, *flags, "--set", "config.log.level=debug")
    assert secrets() == made, "the old pods still know the password"
    config = plane.get("configmap/gateway-prefix-gateway-config", *where)["data"]["config.yaml"]
    assert yaml.safe_load(config)["log"] == {"level": "debug"}
    plane.helm("rollback", "gateway", "1", *where)
    assert secrets() == made
    pool = plane.get("inferencepool/gateway-prefix-gateway", *where)["spec"]
    service = plane.get(f"service/{pool['endpointPickerRef']['name']}", *where)["spec"]
    assert pool["endpointPickerRef"]["port"]["number"] == service["ports"][0]["port"]
    plane.helm("uninstall", "gateway", *where, "--wait")
    await emptied(plane, namespace)
