"""A picker crashes again and again in every pod of the gateway. Envoy serves, the pods stay Ready, and no
request fails.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.cluster.installed import DEADLINE_S, IMAGES, MODEL, SERVERS, Installed
from tests.cluster.pods import container_status, is_ready
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import wait_until

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(1200)]

CRASHES: Final = 9
"""The pauses between the crashes sum up to 37 s. A liveness probe that needs a picker at every moment would
end the container after 30 s.
"""


def since(pod: dict[str, Any]) -> str:
    """Return when the readiness of the pod last changed."""
    (condition,) = [c for c in pod["status"]["conditions"] if c["type"] == "Ready"]
    return str(condition["lastTransitionTime"])


async def test_a_crashing_picker_takes_no_pod_out_of_the_service(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    site = Installed(cluster, namespace)
    with running_node(cluster, images=IMAGES, folder=tmp_path / "node") as node:
        simulated = site.upgrade(
            "servers", "model-server", engine="simulated", replicas=2, profile__model=MODEL
        )
        alone = site.upgrade(
            "gateway",
            "prefix-gateway",
            autoscaling__enabled=False,
            replicas=1,
            sharing__enabled=False,
            drain__settleSeconds=1,
        )
        await asyncio.gather(simulated, alone)
        (pod,) = await site.pods("gateway", component="gateway")
        name = pod["metadata"]["name"]
        url = await site.url()
        asking = asyncio.create_task(ask_until_cancelled(node, url, statuses := Counter[int]()))
        try:
            for _ in range(CRASHES):
                await killed(node, f"{namespace}/{name}")
                await more_answers(statuses)
                assert is_ready(await site.get("pod", name))
        finally:
            asking.cancel()
        assert set(statuses) == {200}
        after = await site.get("pod", name)
        assert since(after) == since(pod), "it was Ready all the time"
        picker = container_status(after, "picker")
        assert (picker["restartCount"], picker["ready"]) == (0, True)
        assert node.log(f"{namespace}/{name}", "picker").count("it is started again") == CRASHES
        await wait_until(lambda: picks(node, pod), what="the picker is back", timeout_s=DEADLINE_S)


async def ask_until_cancelled(node: RunningNode, url: str, statuses: Counter[int]) -> None:
    """Send one request after the other, each over a new connection through the Service."""
    request = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        while True:
            async with session.post(f"{url}/v1/completions", json=request) as response:
                statuses[response.status] += 1
                await response.read()


async def more_answers(statuses: Counter[int]) -> None:
    wanted = statuses.total() + 3
    await wait_until(lambda: statuses.total() >= wanted, what="three more answers", timeout_s=DEADLINE_S)


async def killed(node: RunningNode, pod: str) -> None:
    """Kill the picker as soon as it runs."""

    def done() -> bool:
        try:
            node.signal_child(pod, "picker", signal.SIGKILL, command="epp serve")
        except KeyError:
            return False
        return True

    await wait_until(done, what="a picker to kill", timeout_s=DEADLINE_S)


async def picks(node: RunningNode, pod: dict[str, Any]) -> bool:
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        try:
            async with session.get(f"http://{pod['status']['podIP']}:9090/metrics") as response:
                return f'epp_endpoint_ready{{endpoint="{SERVERS}' in await response.text()
        except aiohttp.ClientError:
            return False
