"""docs/decisions/0202: an object of v1alpha1 stays valid while the CRD first serves and later stores v1."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.processes import wait_until
from tests.reference.crd import crd

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = pytest.mark.cluster

NAME = "prefixroutingpolicies.prefix-gateway.dev"
SPEC = {"targetRef": {"name": "vllm"}, "gain": {"minMatchTokens": 128}}


def crd_with_versions(storage: str, *, served: tuple[str, ...]) -> dict[str, Any]:
    """Return the CRD with both versions, which have the same schema."""
    document: dict[str, Any] = copy.deepcopy(dict(crd()))
    (only,) = document["spec"]["versions"]
    document["spec"]["conversion"] = {"strategy": "None"}
    document["spec"]["versions"] = [
        {**only, "name": name, "served": name in served, "storage": name == storage}
        for name in ("v1alpha1", "v1")
    ]
    return document


async def test_objects_outlive_the_change_of_version(own_cluster: ControlPlane) -> None:
    plane = own_cluster

    def apply(document: Any) -> None:
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))

    def policy(version: str, name: str) -> dict[str, Any]:
        head = {"apiVersion": f"prefix-gateway.dev/{version}", "kind": "PrefixRoutingPolicy"}
        return {**head, "metadata": {"name": name, "namespace": "default"}, "spec": SPEC}

    async def applied(document: dict[str, Any]) -> None:
        """Apply the object as soon as the API server serves the version."""

        def taken() -> bool:
            try:
                apply(document)
            except Exception:  # noqa: BLE001 - whatever kubectl says
                return False
            return True

        await wait_until(taken, what="the version is served", timeout_s=60)

    def read(version: str, name: str) -> Any:
        return plane.get(
            f"prefixroutingpolicies.{version}.prefix-gateway.dev/{name}", "--namespace", "default"
        )

    apply(crd())
    await applied(policy("v1alpha1", "old"))
    assert read("v1alpha1", "old")["spec"]["gain"] == {"minMatchTokens": 128}, (
        "the stored object has the values that were set"
    )

    apply(crd_with_versions("v1alpha1", served=("v1alpha1", "v1")))
    await applied(policy("v1", "new"))
    assert read("v1", "old")["spec"] == read("v1alpha1", "new")["spec"]

    apply(crd_with_versions("v1", served=("v1alpha1", "v1")))
    for name in ("old", "new"):
        plane.kubectl("annotate", "prefixroutingpolicy", name, "seen=again", "--namespace", "default")
    assert plane.get("crd", NAME)["status"]["storedVersions"] == ["v1alpha1", "v1"]
    cut = json.dumps({"status": {"storedVersions": ["v1"]}})
    plane.kubectl("patch", "crd", NAME, "--subresource=status", "--type=merge", f"--patch={cut}")
    apply(crd_with_versions("v1", served=("v1",)))
    for name in ("old", "new"):
        found = read("v1", name)
        assert (found["apiVersion"], found["spec"]["gain"]) == (
            "prefix-gateway.dev/v1",
            {"minMatchTokens": 128},
        )
