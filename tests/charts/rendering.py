"""The charts as helm renders them, and the sets of values that the tests of this folder share."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster_env.images import with_images

REPOSITORY: Final = Path(__file__).parents[2]
GATEWAY: Final = REPOSITORY / "deploy" / "helm" / "prefix-gateway"
MODEL_SERVER: Final = REPOSITORY / "deploy" / "helm" / "model-server"

NAMESPACE: Final = "llm"

Manifest = dict[str, Any]
"""One Kubernetes object."""


class HelmError(AssertionError):
    """Helm failed. The message is helm's own text."""


@dataclass(frozen=True, slots=True)
class ValueSet:
    """The values of one installation of a chart, as a user would write them."""

    name: str
    chart: Path
    values: Mapping[str, Any]

    @property
    def release(self) -> str:
        return "gateway" if self.chart == GATEWAY else "servers"


def behind(provider: str = "", *, route: bool = False, **gateway: Any) -> dict[str, Any]:
    """Return the values of a picker behind a Gateway. `gateway` are more fields of the section."""
    routed = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}} if route else {}
    named = {"provider": provider} if provider else {}
    return {"shape": "gateway", "gateway": {**named, **routed, **gateway}}


VALUE_SETS: Final = (
    ValueSet("gateway-default", GATEWAY, {}),
    ValueSet(
        "gateway-production",
        GATEWAY,
        {
            "image": {
                "repository": "registry.example.com/prefix-gateway/picker",
                "digest": "sha256:" + "0a" * 32,
            },
            "pool": {
                "name": "llama",
                "selector": {"app": "vllm", "model": "llama"},
                "targetPorts": [8000, 8001],
            },
            "policy": {"rule": "least-cost", "gain": {"minMatchTokens": 128}},
            "config": {"workers": 2, "envoy": {"maxBodyBytes": 67108864}, "log": {"level": "warning"}},
            "enabled": True,
            "autoscaling": {"enabled": False},
            "replicas": 3,
            "service": {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "loadBalancerClass": "example.com/internal",
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
            },
            "tls": {
                "secretName": "gateway-tls",
                "certManager": {"issuerRef": {"name": "ca"}, "dnsNames": ["llm.example.com"]},
                "requireClientCertificate": True,
            },
            "sharing": {"url": "rediss://redis.example.com:6380/0", "existingSecret": "redis-password"},
            "monitoring": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}},
            "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]},
            "test": {"model": "llama"},
            "loadTest": {
                "enabled": True,
                "image": {"repository": "registry.example.com/prefix-gateway/load"},
            },
        },
    ),
    ValueSet(
        "gateway-shape",
        GATEWAY,
        {
            **behind(
                failureMode="FailClose",
                tls={"secretName": "picker-tls"},
                httpRoute={
                    "enabled": True,
                    "parentRefs": [{"name": "inference"}],
                    "hostnames": ["llm.example.com"],
                },
            ),
            "sharing": {"enabled": False},
        },
    ),
    ValueSet(
        "gateway-envoy-gateway",
        GATEWAY,
        {
            **behind(
                "envoy-gateway",
                route=True,
                tls={"secretName": "picker-tls", "serverName": "picker.example.com"},
            ),
            "config": {"envoy": {"messageTimeoutSeconds": 0.25, "streamIdleTimeoutSeconds": 1.5}},
            "sharing": {"enabled": False},
        },
    ),
    ValueSet(
        "gateway-istio",
        GATEWAY,
        {
            **behind("istio", tls={"certManager": {"issuerRef": {"name": "ca"}}}),
            "sharing": {"enabled": False},
        },
    ),
    ValueSet(
        "servers-vllm",
        MODEL_SERVER,
        {
            "profile": {
                "model": "org/llama",
                "servedNames": ["llama"],
                "blockSizeTokens": 16,
                "hashSeed": 0,
                "kvEvents": {"replayEndpoint": "tcp://*:5558"},
                "lora": {"maxLoras": 2, "runtimeUpdates": True},
                "extraArgs": ["--gpu-memory-utilization", "0.9"],
                "pools": [{"name": "a100"}, {"name": "h100", "extraArgs": ["--max-num-seqs", "512"]}],
            },
            "pools": {"h100": {"nodeSelector": {"gpu": "h100"}}},
            "autoscaling": {"enabled": True, "keda": {"enabled": True, "prometheus": "http://p:9090"}},
            "vllm": {"huggingFaceSecret": "hugging-face", "cache": {"claimName": "models"}},
            "loraSync": {"enabled": True, "adapters": [{"name": "sql", "path": "/adapters/sql"}]},
            "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
            "serviceAccount": {"create": True, "annotations": {"example.com/role": "models"}},
            "extraEnv": [{"name": "BUCKET", "valueFrom": {"secretKeyRef": {"name": "bucket", "key": "url"}}}],
            "volumes": [{"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters"}}],
            "volumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
        },
    ),
    ValueSet(
        "servers-simulated",
        MODEL_SERVER,
        {
            "engine": "simulated",
            "replicas": 3,
            "profile": {"model": "demo", "lora": {"runtimeUpdates": True}},
            "enabled": True,
        },
    ),
    ValueSet(
        "servers-multi-node",
        MODEL_SERVER,
        {
            "replicas": 3,
            "multiNode": {"enabled": True, "size": 4},
            "profile": {
                "model": "org/large",
                "servedNames": ["large"],
                "lora": {"maxLoras": 2, "runtimeUpdates": True},
                "extraArgs": ["--tensor-parallel-size", "8", "--pipeline-parallel-size", "4"],
            },
            "loraSync": {"enabled": True},
            "vllm": {"resources": {"limits": {"nvidia.com/gpu": 8}}},
        },
    ),
    ValueSet(
        "servers-kv-store",
        MODEL_SERVER,
        {
            "engine": "simulated",
            "replicas": 1,
            "profile": {"model": "smollm2"},
            "simulated": {
                "args": ["--runner", "hf"],
                "kvStore": {"enabled": True, "sizeGB": 50, "ratio": 0.5, "claimName": "prefixes"},
                "resources": {"limits": {"memory": "8Gi"}},
            },
        },
    ),
)


def value_set(name: str) -> ValueSet:
    return next(each for each in VALUE_SETS if each.name == name)


@dataclass(frozen=True, slots=True)
class Helm:
    """The helm binary, without a cluster."""

    binary: Path

    def run(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Return what helm prints. Raise HelmError if helm fails."""
        done = subprocess.run(
            [str(self.binary), *map(str, with_images(arguments))],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def text(self, chart: Path, values: Mapping[str, Any] | None = None, *, release: str = "gateway") -> str:
        """Return the rendered chart as text."""
        words = ("template", release, chart, "--namespace", NAMESPACE, "--values", "-")
        return self.run(*words, stdin=yaml.safe_dump(dict(values or {})))

    def render(
        self, chart: Path, values: Mapping[str, Any] | None = None, *, release: str = "gateway"
    ) -> list[Manifest]:
        """Return the objects of the rendered chart."""
        return [o for o in yaml.safe_load_all(self.text(chart, values, release=release)) if o]

    def render_set(self, wanted: ValueSet) -> list[Manifest]:
        return self.render(wanted.chart, wanted.values, release=wanted.release)


def of_kind(objects: Sequence[Manifest], kind: str, name: str = "") -> Manifest:
    """Return the only object of this kind, or of this kind and name."""
    (found,) = [o for o in objects if o["kind"] == kind and (not name or o["metadata"]["name"] == name)]
    return found


def pod_of(objects: Sequence[Manifest], name: str = "gateway-prefix-gateway") -> Manifest:
    """Return the spec of the pods of this Deployment."""
    spec: Manifest = of_kind(objects, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def pod_specs(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Return the name and the spec of every pod that the objects would make."""
    for each in objects:
        if each["kind"] == "Pod":
            yield each["metadata"]["name"], each["spec"]
        elif "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]
        elif each["kind"] == "LeaderWorkerSet":
            for part in ("leader", "worker"):
                template = each["spec"]["leaderWorkerTemplate"][f"{part}Template"]
                yield f"{each['metadata']['name']} ({part})", template["spec"]


def containers(spec: Manifest) -> Iterator[Manifest]:
    yield from spec.get("initContainers", ())
    yield from spec["containers"]
