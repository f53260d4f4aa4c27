"""Each shape of the gateway as pods, installed beside the model servers as a user does it. The stand-in
kubelet runs the real commands.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.charts.rendering import GATEWAY, MODEL_SERVER
from tests.cluster.installed import IMAGES
from tests.cluster.pods import is_ready
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.certificate import write_tls
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import wait_until

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow]

PATIENCE_S = 240.0
LLM = ("--namespace", "llm")
QUICK = "longestAnswerSeconds=10,drain.settleSeconds=1"
ALONE = f"{QUICK},autoscaling.enabled=false,replicas=1,sharing.enabled=false"


def pods(plane: ControlPlane, *selector: str) -> list[dict[str, Any]]:
    return list(plane.get("pods", *LLM, *selector)["items"])


async def speaks_grpc_over_tls(node: RunningNode, *, address: str, host: str, secret: dict[str, str]) -> bool:
    trusting = ssl.create_default_context(cadata=base64.b64decode(secret["tls.crt"]).decode())
    trusting.set_alpn_protocols(["h2"])
    connection = node.socket()
    await asyncio.get_running_loop().sock_connect(connection, (address, 9002))
    _, writer = await asyncio.open_connection(sock=connection, ssl=trusting, server_hostname=host)
    protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.close()
    return bool(protocol == "h2")


@pytest.mark.timeout(900)
async def test_every_shape_comes_up_serves_and_leaves_nothing(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    plane = own_cluster
    plane.kubectl("apply", "--server-side", "-f", plane.tools.crds)
    plane.kubectl("create", "namespace", "llm")
    tls = write_tls(tmp_path)
    plane.kubectl(
        "create", "secret", "tls", "clients", f"--cert={tls.cert_file}", f"--key={tls.key_file}", *LLM
    )
    with running_node(plane, images=IMAGES, folder=tmp_path / "node") as node:
        simulated = "engine=simulated,profile.model=demo,replicas=1,drain.settleSeconds=1"
        plane.helm("install", "servers", MODEL_SERVER, *LLM, "--set", simulated)
        plane.helm("install", "gateway", GATEWAY, *LLM, "--set", f"{QUICK},test.model=demo")
        secure = f"{ALONE},tls.secretName=clients,config.workers=2"
        plane.helm("install", "secure", GATEWAY, *LLM, "--set", secure)
        plane.helm("install", "behind", GATEWAY, *LLM, "--set", f"{ALONE},shape=gateway")

        def all_ready() -> bool:
            # There is one server. The default's two replicas come from the autoscaler, the default's Valkey
            # is there, and everything else is there once.
            return len(found := pods(plane)) == 6 and all(map(is_ready, found))

        await wait_until(all_ready, what="six ready pods", timeout_s=PATIENCE_S)

        async with aiohttp.ClientSession(connector=node.connector()) as session:
            gateway = plane.get("service/secure-prefix-gateway", *LLM)["spec"]["clusterIP"]
            request = {"model": "demo", "prompt": "Hello", "max_tokens": 2}
            async with session.post(f"https://{gateway}/v1/completions", ssl=False, json=request) as response:
                assert response.status == 200
            for pod in pods(plane, "--selector=app.kubernetes.io/component=gateway"):
                workers = 2 if pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "secure" else 1
                for worker in range(workers):
                    url = f"http://{pod['status']['podIP']}:{9090 + worker}/metrics"
                    async with session.get(url) as response:
                        assert 'epp_endpoint_ready{endpoint="servers-model-server' in await response.text()

            async def replicas_hear_each_other() -> bool:
                heard = []
                for pod in pods(plane, "--selector=app.kubernetes.io/instance=gateway"):
                    if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway":
                        async with session.get(f"http://{pod['status']['podIP']}:9090/metrics") as response:
                            heard.append("\nepp_sharing_peers 1.0\n" in await response.text())
                return heard == [True, True]

            await wait_until(replicas_hear_each_other, what="two replicas share", timeout_s=PATIENCE_S)

        service = plane.get("service/behind-prefix-gateway", *LLM)["spec"]["clusterIP"]
        secret = plane.get("secret/behind-prefix-gateway-picker-tls", *LLM)["data"]
        host = "behind-prefix-gateway.llm.svc"
        assert await speaks_grpc_over_tls(node, address=service, host=host, secret=secret)

        for release in ("gateway", "secure"):
            said = await asyncio.to_thread(plane.helm, "test", release, *LLM)
            assert "Phase:          Succeeded" in said
        for release in ("gateway", "secure", "behind", "servers"):
            plane.helm("uninstall", release, *LLM)

        def left() -> list[str]:
            kinds = "all,secrets,configmaps,roles,networkpolicies,pdb,hpa"
            return plane.kubectl("get", kinds, *LLM, "-o", "name").split()

        kept = ["secret/clients", "configmap/kube-root-ca.crt"]
        await wait_until(lambda: left() == kept, what="nothing is left", timeout_s=PATIENCE_S)
