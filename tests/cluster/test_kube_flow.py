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
