"""A picker process follows a pool on a real API server. Pods come, go, restart and move, and the API server
is away for a while.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace, install_inference_pool
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import simulated_pool
from tests.harness.site import Site, admin, running_site

pytest_plugins = ["tests.cluster_env.fixtures"]
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


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_api_server_that_is_away_changes_nothing_until_it_returns(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    install_inference_pool(own_cluster)
    create_namespace(own_cluster, "models")
    async with running_site(own_cluster, "models", tmp_path, pods=2) as site:
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")
        own_cluster.kill_api_server()

        async def noticed() -> bool:
            return await site.picker.metric("epp_kubernetes_followed", resource="pods") == 0

        await wait_until(noticed, what="the picker sees that the API server is away")
        await site.wait_addresses(*at(site, 0, 1))
        assert (await admin(site.picker, "policy"))["metadata"]["name"] == "p"

        own_cluster.start_api_server()
        async with simulated_pool(own_cluster, "models") as pool:
            await pool.add(site.hosts(1, start=2))
            await pool.remove(["pod-0000"])
        await site.wait_addresses(*at(site, 1, 2))
        assert await site.picker.metric("epp_kubernetes_followed", resource="pods") == 1
        site.policies.apply("p", rule="random")
        await site.wait_policy("p", rule="random")
