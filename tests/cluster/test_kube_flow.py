"""Flow control under a PrefixRoutingPolicy on a real API server: the policy and an InferenceObjective change
while requests wait. test_kube_objectives has the cases of a single objective.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.test_kube_objectives import POLICY, SiteGateway, site_gateway
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.processes import wait_until
from tests.harness.site import admin

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]

CHANGES: Final[tuple[Mapping[str, Any], ...]] = (
    {"goalSeconds": 0.5},
    {"deadlineSeconds": 1, "order": "Deadline"},
    {"deadlineSeconds": 1},
    {"objectives": {"people": -3}, "inAll": {"maxRequests": 100}},
)


async def change_flow(asked: SiteGateway, **flow: Any) -> None:
    """Apply the policy with this flow control, and wait until the picker uses it."""
    site = asked.site
    site.policies.apply("p", **{**POLICY, "flow": flow})
    generation = (await site.policies.read("p"))["metadata"]["generation"]

    async def in_use() -> bool:
        return bool((await admin(site.picker, "policy"))["metadata"]["generation"] == generation)

    await wait_until(in_use, what=f"flow {flow} is in use")


async def wait_status(asked: SiteGateway, name: str, **wanted: Any) -> None:
    """Wait until the status of a policy has these values."""

    async def has_values() -> bool:
        status = (await asked.site.policies.read(name)).get("status", {})
        return {key: status.get(key) for key in wanted} == wanted

    await wait_until(has_values, what=f"the status of {name} says {wanted}")


async def test_waiting_requests_outlive_changes_of_policy_and_objective(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with site_gateway(cluster, namespace, tmp_path) as asked, AsyncExitStack() as stack:
        await asked.set_objective(10)
        await asked.wait_priority(10)
        tasks = await asked.wait_behind_one(stack, named=(True, False, True, False))
        for flow in CHANGES:
            await change_flow(asked, mode="Hold", **flow)
        await asked.set_objective(-10)
        await asked.wait_priority_waiting(stack, -10)
        await asked.set_objective(None)
        await asked.wait_priority_waiting(stack, -3)  # the policy's priority applies when the object is gone
        assert [task.done() for task in tasks.values()] == [False] * 4
        await change_flow(asked, mode="Direct")
        answers = await asyncio.gather(*tasks.values())
        assert all(answer.destination for answer in answers)
        priorities = [(await asked.decision(number))["priority"] for number in tasks]
        assert priorities == [10, 0, 10, 0], "a priority is fixed when a request comes"
        assert await asked.site.picker.metric("epp_refused_total") == 0
        assert await asked.site.picker.metric("epp_flow_waiting_requests") == 0


async def test_a_smaller_bound_refuses_the_requests_over_it_and_keeps_the_rest(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with site_gateway(cluster, namespace, tmp_path) as asked, AsyncExitStack() as stack:
        tasks = [*(await asked.wait_behind_one(stack, named=(False,) * 4)).values()]
        await change_flow(asked, mode="Hold", inAll={"maxRequests": 3})
        refused = (await tasks[-1]).refused
        assert (refused.status, refused.headers["x-llm-d-request-dropped-reason"]) == (429, "flow_full")
        asked.site.servers.running = 0
        assert all(answer.destination for answer in await asyncio.gather(*tasks[:3]))


async def test_the_status_says_the_saturation_and_the_agreement_of_a_dry_run(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with site_gateway(cluster, namespace, tmp_path) as asked, AsyncExitStack() as stack:
        site = asked.site
        await wait_status(asked, "p", saturation="0.00")
        flow = {"mode": "Hold"}
        site.policies.apply("trial", **{**POLICY, "flow": flow}, mode="DryRun")
        await site.policies.wait_conditions("trial", "Accepted=True/Accepted@1", "Programmed=False/DryRun@1")
        await asked.wait_behind_one(stack, named=(False, False))

        async def saturated() -> bool:
            return float((await site.policies.read("p"))["status"]["saturation"]) > 1

        await wait_until(saturated, what="the status says that there are too few servers")
        assert " SATURATION " in site.plane.kubectl("get", "prp", "-n", namespace, "-o", "wide")
        await wait_status(asked, "trial", dryRun={"picks": 1, "agreement": "1.000"})
        await change_flow(asked, mode="Direct")
        await wait_status(asked, "p", saturation=None)
