"""InferenceModelRewrites on a real API server. The picker follows them with its own rights and writes the
outcome into their status.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import yaml

from epp.base.types import ApiKind, InferenceRequest
from epp.config.kubernetes import Kubernetes
from epp.sources.keep import Sources
from epp.sources.kube.api import Api
from epp.sources.kube.objects import ModelRewrite
from epp.sources.kube.reflector import ListSource, Reflector
from epp.sources.kube.rewrites import PATHS, all_rewrites, model_rewrites
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import POOL, picker_account

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]

_NAME = {"type": "string", "minLength": 1}
_MATCH = {
    "type": "object",
    "required": ["value"],
    "properties": {"type": {"type": "string", "default": "Exact", "enum": ["Exact"]}, "value": _NAME},
}
_TARGET = {
    "type": "object",
    "required": ["modelRewrite"],
    "properties": {
        "modelRewrite": {"type": "string"},
        "weight": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 1_000_000},
    },
}
_RULE = {
    "type": "object",
    "properties": {
        "matches": {
            "type": "array",
            "items": {"type": "object", "required": ["model"], "properties": {"model": _MATCH}},
        },
        "targets": {"type": "array", "minItems": 1, "items": _TARGET},
    },
}
_POOL_REF = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "default": "llm-d.ai"},
        "kind": {"type": "string", "default": "InferencePool"},
        "name": _NAME,
    },
}
_SPEC = {
    "type": "object",
    "required": ["poolRef", "rules"],
    "properties": {"poolRef": _POOL_REF, "rules": {"type": "array", "items": _RULE}},
}
_CONDITION = {
    "type": "object",
    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
    "properties": {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "reason": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "message": {"type": "string", "maxLength": 32768},
    },
}
_PENDING = {
    "type": "Accepted",
    "status": "Unknown",
    "reason": "Pending",
    "message": "Waiting for controller",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}
_STATUS = {
    "type": "object",
    "properties": {
        "conditions": {
            "type": "array",
            "maxItems": 8,
            "default": [_PENDING],
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": _CONDITION,
        }
    },
}
_PLURAL = "inferencemodelrewrites.llm-d.ai"
_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": _PLURAL},
    "spec": {
        "group": "llm-d.ai",
        "scope": "Namespaced",
        "names": {
            "kind": "InferenceModelRewrite",
            "listKind": "InferenceModelRewriteList",
            "plural": "inferencemodelrewrites",
            "singular": "inferencemodelrewrite",
        },
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "properties": {"spec": _SPEC, "status": _STATUS}}
                },
                "subresources": {"status": {}},
            }
        ],
    },
}
"""The fields of llm-d's CRD that users write, and its status."""


def install_crd(cluster: ControlPlane) -> None:
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(_CRD))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", f"crd/{_PLURAL}")


def rewrite_document(name: str, model: str, target: str, *, namespace: str, pool: str = POOL) -> str:
    return json.dumps(
        {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceModelRewrite",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "poolRef": {"group": "inference.networking.k8s.io", "name": pool},
                "rules": [{"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": target}]}],
            },
        }
    )


async def test_rewrites_are_followed_as_they_come_change_and_go(
    cluster: ControlPlane, namespace: str
) -> None:
    install_crd(cluster)
    account: Path = picker_account(cluster, namespace)
    sink = model_rewrites(pools=[POOL], group="llm-d.ai")

    def target(model: str) -> str:
        inference = InferenceRequest(kind=ApiKind.OTHER, model=model)
        return all_rewrites([sink]).target(inference, session="", request_id="")

    api = await Api.connect(Kubernetes(pool=POOL, kubeconfig=str(account)))
    source = ListSource(
        what="rewrites", kind=ModelRewrite, path=PATHS["llm-d.ai"].format(namespace=namespace)
    )
    reflector = Reflector(
        api, source, sink=sink, on_change=lambda: None, on_state=lambda *_: None, rng=random.Random(1)
    )
    task = asyncio.create_task(Sources(rng=random.Random(1)).keep("kubernetes", reflector.run))
    try:
        cluster.kubectl("apply", "-f", "-", stdin=rewrite_document("r", "gpt", "llama", namespace=namespace))
        await wait_until(lambda: target("gpt") == "llama", what="the new object counts")
        cluster.kubectl(
            "apply", "-f", "-", stdin=rewrite_document("r", "gpt", "mistral", namespace=namespace)
        )
        await wait_until(lambda: target("gpt") == "mistral", what="the changed object counts")
        cluster.kubectl("delete", "-n", namespace, _PLURAL, "r")
        await wait_until(lambda: target("gpt") == "gpt", what="the object is gone")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
