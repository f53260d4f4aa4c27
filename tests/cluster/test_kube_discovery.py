"""A picker process follows a pool on a real API server. Pods start, come, go and move."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace
from tests.harness.data_plane import DUPLEX, exchange
from tests.harness.processes import wait_until
from tests.harness.site import Site, running_site

pytestmark = [pytest.mark.cluster]


def at(site: Site, *numbers: int, port: int = 0) -> list[str]:
    return [f"{site.servers.host(n)}:{port or site.servers.port}" for n in numbers]


async def test_pods_come_go_move_and_change_ports(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=2) as site:
        await site.wait_addresses(*at(site, 0, 1))
        assert set(await site.endpoints()) == {
            f"pod-0000:{site.servers.port}",
            f"pod-0001:{site.servers.port}",
        }

        await site.pool.add(site.hosts(1, start=2))
        await site.wait_addresses(*at(site, 0, 1, 2))

        await site.pool.report(site.hosts(1), ready=False)
        await site.wait_addresses(*at(site, 1, 2))

        await site.pool.report({"pod-0001": site.servers.host(5)})
        await site.wait_addresses(*at(site, 5, 2))

        await site.pool.remove(["pod-0002"])
        await site.wait_addresses(*at(site, 5))

        other = site.servers.port + 1
        await site.pool.change({"targetPorts": [{"number": site.servers.port}, {"number": other}]})
        await site.wait_addresses(*at(site, 5), *at(site, 5, port=other))


async def test_without_the_crd_of_pools_pods_are_found_by_labels_and_ports(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    """This control plane does not have the CRD of InferencePool."""
    create_namespace(own_cluster, "models")
    async with running_site(
        own_cluster,
        "models",
        tmp_path,
        pods=2,
        pool=False,
        kubernetes={"selector": {"app": "vllm"}, "targetPorts": [8000, 8001]},
    ) as site:
        await site.wait_addresses(*at(site, 0, 1, port=8000), *at(site, 0, 1, port=8001))
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")


async def test_by_default_requests_wait_while_a_pod_is_starting(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with (
        running_site(cluster, namespace, tmp_path) as site,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/picker.sock") as channel,
    ):

        async def asked() -> int:
            async with exchange(channel, mode=DUPLEX) as one:
                await one.send(json.dumps({"model": "m", "prompt": "x"}).encode())
                return one.immediate.status if one.immediate else 200

        assert await asked() == 503
        await site.pool.add(site.hosts(1), started=False)
        tasks: list[asyncio.Task[int]] = []

        async def waits() -> bool:
            tasks.append(asyncio.create_task(asked()))
            answered, _ = await asyncio.wait(tasks[-1:], timeout=1.0)
            return not answered

        await wait_until(waits, what="a request is not refused at once")
        await site.pool.report(site.hosts(1))
        assert await tasks[-1] == 200
        await site.pool.report(site.hosts(1), ready=False)
        await site.wait_addresses()
        assert await asked() == 503, "a server that has started and is not ready is not waited for"
