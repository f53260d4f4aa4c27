"""The gateway's life in a cluster, by the charts, under load: it is installed and used, its policy changes,
it is scaled, harmed and upgraded, its API server goes away, and it is removed.
The control plane, helm, kubectl, Envoy, the picker and the model servers are real. A stand-in kubelet runs
the pods. This is one test, because each chapter continues from the one before. Each chapter is a function.
No request may fail in any of them.
"""

import asyncio
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.installed import (
    DEADLINE_S,
    GATEWAY,
    IMAGES,
    IN_FLIGHT,
    LONGEST_ANSWER_S,
    SERVERS,
    Installed,
    site_on,
)
from tests.cluster.steady_load import SteadyLoad, steady_load
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(2400)]

OUTAGE_S: Final = 20
CRASHES: Final = 9


def ready_since(document: Mapping[str, Any]) -> str:
    """Return when the pod became Ready. Fail if it is not."""
    (condition,) = [c for c in document["status"]["conditions"] if c["type"] == "Ready"]
    assert condition["status"] == "True", condition
    return str(condition["lastTransitionTime"])


def container_status(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    status = document["status"]
    entries = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((entry for entry in entries if entry["name"] == name), {"state": {}, "restartCount": 0})


async def test_the_gateway_in_a_cluster_from_install_to_uninstall(
    own_cluster: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_on(own_cluster)
    await site.apply_crds()
    with running_node(own_cluster, images=IMAGES, folder=tmp_path / "node") as node:
        await install(site)
        url = await site.url()
        connector = node.connector(force_close=True, limit=0)
        async with steady_load(connector, url, capsys=capsys) as load:
            await servers_come_and_go(site, node, load)
            await a_picker_dies_and_all_are_renewed(site, node, load)
            await a_picker_crashes_again_and_again(site, node, load)
            await the_gateway_is_renewed(site, load)
            await the_api_server_is_away(site, load)
        await uninstall(site)


async def install(site: Installed) -> None:
    """Install both releases side by side and wait for each."""
    await asyncio.gather(
        site.upgrade_servers(replicas=3),
        site.upgrade("gateway", "prefix-gateway", longestAnswerSeconds=LONGEST_ANSWER_S),
    )
    assert len(await site.pods("servers")) == 3
    assert len(await site.pods("gateway", component="gateway")) == 2
    assert "Succeeded" in await site.helm("test", "gateway")


async def servers_come_and_go(site: Installed, node: RunningNode, load: SteadyLoad) -> None:
    with load.phase("servers scaled from 3 to 6"):
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=6")
        await site.rolled_out(SERVERS)
        await load.answers(IN_FLIGHT)
    with load.phase("servers scaled from 6 to 3"):
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=3")
        await site.pods_are(node, "servers", 3)
        await load.answers(IN_FLIGHT)
    with load.phase("a server's pod deleted"):
        victim = (await site.pods("servers"))[0]["metadata"]["name"]
        await site.kubectl("delete", "pod", victim)
        await site.rolled_out(SERVERS)
        await site.pods_are(node, "servers", 3)
    with load.phase("a server's container restarted"):
        victim = (await site.pods("servers"))[0]["metadata"]["name"]
        node.signal(f"{site.namespace}/{victim}", "server", signal.SIGTERM)
        await restarted_once(site, victim, "server")
        await load.answers(IN_FLIGHT)


async def a_picker_dies_and_all_are_renewed(site: Installed, node: RunningNode, load: SteadyLoad) -> None:
    with load.phase("a picker killed (SIGKILL)"):
        victim = (await site.pods("gateway", component="gateway"))[0]["metadata"]["name"]
        node.signal(f"{site.namespace}/{victim}", "picker", signal.SIGKILL)
        await restarted_once(site, victim, "picker")
        await load.answers(IN_FLIGHT)
    with load.phase("rolling update of the picker"):
        await site.kubectl("rollout", "restart", f"deployment/{GATEWAY}")
        await site.rolled_out(GATEWAY)
        await load.answers(IN_FLIGHT)


async def a_picker_crashes_again_and_again(site: Installed, node: RunningNode, load: SteadyLoad) -> None:
    """Envoy serves meanwhile, and the pod stays Ready. A liveness probe that needs a picker at every moment
    would end the container after 30 s, and the pauses between the crashes sum up to 37 s.
    """
    pod = (await site.pods("gateway", component="gateway"))[1]
    name = pod["metadata"]["name"]

    def killed() -> bool:
        """Kill the picker, once it runs."""
        try:
            node.signal_child(f"{site.namespace}/{name}", "picker", signal.SIGKILL, command="epp serve")
        except KeyError:
            return False
        return True

    def noticed(crashes: int) -> bool:
        return node.log(f"{site.namespace}/{name}", "picker").count("it is started again") == crashes

    with load.phase(f"a picker crashes {CRASHES} times"):
        for n in range(1, CRASHES + 1):
            await wait_until(killed, what="a picker to kill", timeout_s=DEADLINE_S)
            await wait_until(partial(noticed, n), what="the end of the picker", timeout_s=DEADLINE_S)
            await load.answers(3)
        await load.answers(IN_FLIGHT)
    after = await site.get("pod", name)
    assert ready_since(after) == ready_since(pod), "it was Ready all the time"
    assert container_status(after, "picker")["restartCount"] == 0
    assert noticed(CRASHES)


async def restarted_once(site: Installed, pod: str, container: str) -> None:
    """Wait until a container has ended and is back in service."""

    async def restarted() -> bool:
        status = container_status(await site.get("pod", pod), container)
        return bool(status["restartCount"] == 1 and status["ready"])

    await wait_until(restarted, what=f"{container} of {pod} has restarted", timeout_s=DEADLINE_S)


async def the_gateway_is_renewed(site: Installed, load: SteadyLoad) -> None:
    with load.phase("helm upgrade of the gateway"):
        await site.upgrade(
            "gateway",
            "prefix-gateway",
            longestAnswerSeconds=LONGEST_ANSWER_S,
            config__log__level="warning",
        )
        await load.answers(IN_FLIGHT)
    with load.phase("helm rollback of the gateway"):
        await site.helm("rollback", "gateway", "1", "--wait", "--timeout", f"{DEADLINE_S:.0f}s")
        await load.answers(IN_FLIGHT)
    with load.phase("helm upgrade of the servers"):
        await site.upgrade_servers("--max-num-seqs", "128", replicas=3)
        await load.answers(IN_FLIGHT)


async def the_api_server_is_away(site: Installed, load: SteadyLoad) -> None:
    """While the API server is away nothing can be changed, and nothing else changes. Afterwards changes work
    again.
    """
    with load.phase(f"API server away for {OUTAGE_S} s") as phase:
        site.plane.kill_api_server()
        await asyncio.sleep(OUTAGE_S)
    assert phase.hit_ratio > 0.9, "routing by cached prefixes goes on"
    with load.phase("API server back"):
        await asyncio.to_thread(site.plane.start_api_server)
        await site.apply(await site.policy("routing", rule="affinity"))
        await site.wait_policy("routing", "Programmed", status="True")
        await load.answers(IN_FLIGHT)


async def uninstall(site: Installed) -> None:
    """After the uninstall only the CRDs and the objects that the cluster makes in every namespace
    are left.
    """
    await site.kubectl("delete", "prefixroutingpolicy", "routing")
    await site.helm("uninstall", "gateway", "--wait")
    await site.helm("uninstall", "servers", "--wait")
    clusters_own = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    assert await site.gone(but=clusters_own.__contains__) == []
    crds = (await site.kubectl("get", "crd", "-o", "name")).split()
    assert crds == [
        "customresourcedefinition.apiextensions.k8s.io/inferencepools.inference.networking.k8s.io",
        "customresourcedefinition.apiextensions.k8s.io/prefixroutingpolicies.prefix-gateway.dev",
    ]
    made = ("clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/managed-by=Helm", "-o", "name")
    assert await site.kubectl("get", *made) == ""
