"""The conformance suite of gateway-api-inference-extension with our picker in the place of its own.

The suite, its manifests and its echo servers are real, and so are the control plane, Envoy and the picker.
The Gateway is a stand-in (`suite_gateway`), so only the tests that concern a picker run.
"""

import asyncio
import json
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.cluster.suite_gateway import CLASS, running_gateways
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.go_programs import GatewaySuite
from tests.cluster_env.preparing import await_established, create_namespace
from tests.harness.kubelet.images import REPOSITORY, Image, python_image
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.role import rules
from tests.harness.simulated_pool import install_policy_crd

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(1200)]

SERVERS: Final = "inference-conformance-app-backend"
GATEWAYS: Final = "inference-conformance-infra"
ECHO: Final = "gcr.io/k8s-staging-gateway-api/echo-basic"
POOLS: Final = tuple(
    f"{name}-inference-pool" for name in ("primary", "secondary", "dp", "appprotocol-http", "appprotocol-h2c")
)
OF_A_GATEWAY: Final = (
    "GatewayWeightedAcrossTwoInferencePools",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolResolvedRefsCondition",
)
"""The tests that ask nothing of a picker: statuses of routes and pools, and routes to several pools."""
OF_A_PICKER: Final = (
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "InferencePoolAppProtocol",
)


async def test_the_gateway_suite_passes_with_our_picker(
    own_cluster: ControlPlane,
    gateway_suite: GatewaySuite,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for crd in sorted(gateway_suite.crds.iterdir()):
        own_cluster.kubectl("apply", "--server-side", "-f", crd)
        await_established(own_cluster, "-f", crd)
    install_policy_crd(own_cluster)
    for namespace in (SERVERS, GATEWAYS):
        create_namespace(own_cluster, namespace)
    # The suite waits for a pod of the Gateways, and these Gateways have none.
    own_cluster.kubectl("run", "gateway", "-n", GATEWAYS, f"--image={ECHO}:any")
    allow_the_picker(own_cluster)
    echo = Image(entrypoint=(str(gateway_suite.echo),), folders=(str(gateway_suite.echo.parent),))
    images = {
        ECHO: echo,
        "registry.k8s.io/gateway-api-inference-extension/lwepp": python_image(
            "python", str(REPOSITORY / "tests" / "cluster" / "suite_picker.py")
        ),
    }
    with running_node(own_cluster, images=images, folder=tmp_path / "node") as node:
        async with running_gateways(node, own_cluster.kubeconfig, folder=tmp_path / "gateways"):
            report, output = await run_suite(own_cluster, gateway_suite, node, folder=tmp_path)
    with capsys.disabled():
        print(f"\n{yaml.safe_dump(report)}")
    (profile,) = report["profiles"]
    assert profile["core"]["statistics"] == {
        "Failed": 0,
        "Passed": len(OF_A_PICKER),
        "Skipped": len(OF_A_GATEWAY),
    }, output
    for name in OF_A_PICKER:
        assert f"--- PASS: TestConformance/{name} " in output


def allow_the_picker(cluster: ControlPlane) -> None:
    """Give the suite's service account the role of our chart. The suite's own role knows no policies."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "picker", "namespace": SERVERS},
        "rules": list(rules(pools=POOLS)),
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    account = f"--serviceaccount={SERVERS}:default"
    cluster.kubectl("create", "rolebinding", "picker", "--role=picker", account, "-n", SERVERS)


async def run_suite(
    cluster: ControlPlane, suite: GatewaySuite, node: RunningNode, *, folder: Path
) -> tuple[dict[str, list[dict[str, dict[str, object]]]], str]:
    """Run the suite in the node's network. Return its report and what it prints."""
    options = (
        "-test.v",
        f"-gateway-class={CLASS}",
        f"-skip-tests={','.join(OF_A_GATEWAY)}",
        f"-report-output={folder / 'report.yaml'}",
        "-organization=prefix-gateway",
        "-project=prefix-gateway",
        "-url=none",
        "-version=main",
        "-contact=maintainers",
        "-cleanup-base-resources=false",
    )
    printed = folder / "suite.log"
    with printed.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *node.inside([str(suite.program), *options]),
            stdout=log,
            stderr=log,
            env={"KUBECONFIG": str(cluster.kubeconfig_inside()), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        await process.wait()
    output = printed.read_text()
    assert (folder / "report.yaml").exists(), output[-20000:]
    return yaml.safe_load((folder / "report.yaml").read_text()), output
