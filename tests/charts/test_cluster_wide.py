"""deploy/crds: the CRD never goes down, and who administers a namespace can install the charts there."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.charts.rendering import GATEWAY, MODEL_SERVER, REPOSITORY
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import await_established, create_namespace
from tests.harness.processes import wait_until

pytestmark = pytest.mark.cluster

CRDS: Final = REPOSITORY / "deploy" / "crds"
NAME: Final = "prefixroutingpolicies.prefix-gateway.dev"
NO_PODS: Final = ("--set", "replicas=0")
SPEC: Final[dict[str, Any]] = {
    "targetRef": {"name": "gateway-prefix-gateway"},
    "rule": "affinity",
    "flow": {"deadlineSeconds": 5},
    "failures": {"maxEjectedShare": 0.25},
}


def older_crd() -> dict[str, Any]:
    """Return the CRD as an older release had it: without some fields, and without a revision."""
    document: dict[str, Any] = yaml.safe_load((CRDS / "prefixroutingpolicies.yaml").read_text())
    schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["title"]
    for field in ("rule", "flow", "failures"):
        del schema["properties"]["spec"]["properties"][field]
    return document


def older_chart(folder: Path) -> Path:
    """Return a chart whose release owns the CRD, as that of 0.1.0 does. `test.model` leaves it out."""
    older = folder / "prefix-gateway"
    shutil.copytree(GATEWAY, older)
    text = yaml.safe_dump(older_crd())
    (older / "templates" / "crd.yaml").write_text(
        f"{{{{- if not .Values.test.model }}}}\n{text}{{{{- end }}}}\n"
    )
    return older


def apply_crds(plane: ControlPlane) -> None:
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", CRDS)
    await_established(plane, f"crd/{NAME}")


async def test_policies_outlive_the_way_to_an_older_release_and_back(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    plane, where = own_cluster, ("--namespace", "one")
    for namespace in ("one", "two"):
        create_namespace(plane, namespace)
    older = older_chart(tmp_path)
    plane.helm("install", "gateway", older, *where, *NO_PODS)

    apply_crds(plane)
    # A second tool that applies the same files gets no conflict.
    plane.kubectl("apply", "--server-side", "--field-manager=argocd", "-f", CRDS)
    plane.helm("upgrade", "gateway", GATEWAY, *where, *NO_PODS)
    head = {"apiVersion": "prefix-gateway.dev/v1alpha1", "kind": "PrefixRoutingPolicy"}
    policy = {**head, "metadata": {"name": "chat"}, "spec": SPEC}
    plane.kubectl("apply", *where, "-f", "-", stdin=json.dumps(policy))

    def stored() -> Any:
        return plane.get("prefixroutingpolicy/chat", *where)["spec"]

    async def refused() -> None:
        """The API server refuses the older CRD once it has read the policy about it."""
        refusal = ""

        def refuses() -> bool:
            nonlocal refusal
            command = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
            refusal = plane.kubectl_fails(*command, stdin=yaml.safe_dump(older_crd()))
            return "older than the installed one" in refusal

        await wait_until(refuses, what="the older CRD is refused", timeout_s=60)

    await refused()
    plane.helm_fails("rollback", "gateway", "1", *where)
    assert stored() == SPEC
    plane.helm("upgrade", "gateway", older, *where, *NO_PODS, "--set", "test.model=without-the-crd")
    status = json.dumps({"status": {"observedGeneration": 1}})
    patch = ("--subresource=status", "--type=merge", f"--patch={status}")
    plane.kubectl("patch", "prefixroutingpolicy", "chat", *where, *patch)
    assert stored() == SPEC, "the older picker's write of a status stores no loss"
    apply_crds(plane)
    plane.helm("upgrade", "gateway", GATEWAY, *where, *NO_PODS)
    assert stored() == SPEC

    plane.helm("install", "gateway", GATEWAY, "--namespace", "two", *NO_PODS)
    for namespace in ("one", "two"):
        plane.helm("uninstall", "gateway", "--namespace", namespace)
    assert stored() == SPEC, "the CRD is of no release"


def test_who_administers_a_namespace_installs_both_charts_there(own_cluster: ControlPlane) -> None:
    plane, where = own_cluster, ("--namespace", "team")
    create_namespace(plane, "team")
    plane.kubectl("apply", "--server-side", "-f", plane.tools.crds)
    apply_crds(plane)
    plane.kubectl("create", "serviceaccount", "admin", *where)
    plane.kubectl(
        "create", "rolebinding", "admin", "--clusterrole=admin", "--serviceaccount=team:admin", *where
    )
    user = ("--kubeconfig", plane.kubeconfig_for("admin", namespace="team"))
    plane.kubectl("auth", "can-i", "patch", "prefixroutingpolicies/status", *where, *user)
    plane.helm("install", "servers", MODEL_SERVER, *where, *user, "--set", "engine=simulated,replicas=0")
    plane.helm("install", "gateway", GATEWAY, *where, *user, *NO_PODS)
    plane.helm("upgrade", "gateway", GATEWAY, *where, *user, *NO_PODS, "--set", "longestAnswerSeconds=60")
    plane.helm("install", "behind", GATEWAY, *where, *user, *NO_PODS, "--set", "shape=gateway")
    plane.helm("uninstall", "behind", *where, *user)
    rights = plane.helm("template", "split", GATEWAY, *where, "--show-only", "templates/rbac.yaml")
    plane.kubectl("delete", "clusterrole", "prefix-gateway-install")
    plane.kubectl("apply", *where, "-f", "-", stdin=rights)
    split = "rbac.create=false,serviceAccount.create=false,serviceAccount.name=split-prefix-gateway"
    plane.helm("install", "split", GATEWAY, *where, *user, *NO_PODS, "--set", split)
    for release in ("split", "gateway", "servers"):
        plane.helm("uninstall", release, *where, *user)
