"""Kubernetes objects for the tests, as JSON values. A test names the fields that matter to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.config.policy import API_VERSION, KIND
from epp.config.sections import LlmdGroup
from epp.sources.kube.llmd import ModelRewrites, rewrites_in
from epp.sources.kube.objects import Condition, ModelRewrite, Pod, PolicyObject, Pool
from tests.invariants.kube import check_collection


def pod(
    name: str,
    *ips: str,
    ready: bool = True,
    ports: Mapping[str, Sequence[int]] | None = None,
    restarts: Mapping[str, int] | None = None,
    uid: str = "",
    created: str = "2026-01-01T00:00:00Z",
    deleted: str | None = None,
    annotations: Mapping[str, str] | None = None,
    parts: Mapping[str, bool] | None = None,
    gates: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    started: bool = True,
    state: str = "running",
) -> Pod:
    """Return a pod. `ports` and `restarts` are by container; by default there is one container, `vllm`.
    `parts` are conditions besides Ready. `gates` are the names of conditions that the pod has as readiness
    gates.
    """
    ports = {"vllm": [8000]} if ports is None else ports
    restarts = restarts or {}
    document: dict[str, Any] = {
        "metadata": {
            "name": name,
            "uid": uid or f"uid-of-{name}",
            "resourceVersion": "1",
            "creationTimestamp": created,
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": {"unrelated": "x" * 50, **(annotations or {})},
        },
        "spec": {
            "nodeName": "n1",
            "readinessGates": [{"conditionType": gate} for gate in gates],
            "containers": [
                {"name": container, "image": "i", "ports": [{"containerPort": port} for port in declared]}
                for container, declared in ports.items()
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": ips[0] if ips else "",
            "podIPs": [{"ip": ip} for ip in ips],
            "conditions": [
                {"type": "Initialized", "status": "True"},
                *({"type": kind, "status": str(so)} for kind, so in (parts or {}).items()),
                {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": created},
            ],
            "containerStatuses": [
                {
                    "name": container,
                    "ready": ready,
                    "started": started,
                    "state": {state: {}},
                    "restartCount": restarts.get(container, 0),
                    "containerID": f"containerd://{name}-{container}-{restarts.get(container, 0)}",
                }
                for container in ports
            ],
        },
    }
    if deleted:
        document["metadata"]["deletionTimestamp"] = deleted
    return msgspec.json.decode(msgspec.json.encode(document), type=Pod)


def pool(*ports: int, name: str = "vllm", labels: Mapping[str, str] | None = None, uid: str = "u") -> Pool:
    document = {
        "metadata": {"name": name, "uid": uid, "resourceVersion": "1"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"} if labels is None else dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        },
    }
    return msgspec.json.decode(msgspec.json.encode(document), type=Pool)


def policy(
    name: str,
    *,
    generation: int = 1,
    created: str = "2026-01-01T00:00:00Z",
    target: str = "vllm",
    uid: str = "",
    kind: str = "InferencePool",
    status: Mapping[str, Any] | None = None,
    **spec: Any,
) -> PolicyObject:
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": "n",
            "uid": uid or f"uid-of-{name}",
            "generation": generation,
            "creationTimestamp": created,
            "resourceVersion": str(generation),
        },
        "spec": {"targetRef": {"name": target, "kind": kind}, **spec},
        "status": status or {},
    }
    return msgspec.json.decode(msgspec.json.encode(document), type=PolicyObject)


def rule(*models: str, target: str = "t", **more: Any) -> dict[str, Any]:
    return {
        "matches": [{"model": {"value": m}} for m in models],
        "targets": [{"modelRewrite": target, **more}],
    }


def rewrite(
    name: str,
    *rules: dict[str, Any],
    pool: str = "vllm",
    generation: int = 1,
    version: str = "1",
    conditions: tuple[Condition, ...] = (),
) -> ModelRewrite:
    document = {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "generation": generation,
            "resourceVersion": version,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"poolRef": {"name": pool}, "rules": rules},
        "status": {"conditions": [msgspec.to_builtins(c) for c in conditions]},
    }
    return msgspec.convert(document, type=ModelRewrite)


def rewrites_of(*objects: ModelRewrite, group: LlmdGroup = "llm-d.ai") -> ModelRewrites:
    """Return the rewrites of one pool from these objects."""
    (found,) = rewrites_in([group], pools=["vllm"])
    found.replace(objects)
    check_collection(found)
    return found
