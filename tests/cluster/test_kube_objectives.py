"""llm-d's objects on a real API server. InferenceObjectives of both API groups decide which of two waiting
requests goes first, and InferenceModelRewrites which model answers. Changes apply at once. The policy says
that the only server of the pool computes one token a second, so one prompt keeps the server busy.
The server's metrics page shows no running request, so the server seems free.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.data_plane import DUPLEX, StreamExchange, exchange
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import POOL
from tests.harness.site import Site, running_site

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]

NEW: Final = "llm-d.ai"
OLD: Final = "inference.networking.x-k8s.io"
HEADERS: Final = {NEW: "x-llm-d-inference-objective", OLD: "x-gateway-inference-objective"}
POLICY: Final[dict[str, Any]] = {
    "cost": {"prefillTokensPerSecond": 1},
    "scrape": {"intervalSeconds": 0.1, "staleAfterSeconds": 60},
    "flow": {"mode": "Hold"},
}


def plural(group: str, kind: str = "InferenceObjective") -> str:
    return f"{kind.lower()}s.{group}"


def install_crd(plane: ControlPlane, group: str, kind: str = "InferenceObjective") -> None:
    """Install a CRD that takes any fields, with a status."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    version = {"name": "v1alpha2", "served": True, "storage": True, "subresources": {"status": {}}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": f"{kind.lower()}s", "singular": kind.lower()}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The API server guards names under k8s.io: a CRD there must name the approval of its API.
        "metadata": {
            "name": plural(group, kind),
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=120s", f"crd/{plural(group, kind)}")


class SiteGateway:
    """The picker of the site as a gateway uses it."""

    def __init__(self, site: Site, channel: grpc.aio.Channel) -> None:
        self.site = site
        self._channel = channel
        self._asked = 0

    async def set_objective(self, priority: int | None, *, group: str = NEW) -> None:
        """Set the priority of the object `people`. None deletes the object."""
        site = self.site
        if priority is None:
            site.plane.kubectl("delete", "-n", site.namespace, plural(group), "people")
            return
        document = {
            "apiVersion": f"{group}/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": {"name": "people", "namespace": site.namespace},
            "spec": {"priority": priority, "poolRef": {"group": "inference.networking.k8s.io", "name": POOL}},
        }
        site.plane.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    async def wait_priority(self, priority: int, *, group: str = NEW) -> None:
        """Wait until a request that names `people` has this priority."""

        async def has_priority() -> bool:
            async with AsyncExitStack() as stack:
                await (await self._begin(stack, named=True, group=group))
                decision = await self.decision(self._asked)
                return bool(decision["priority"] == priority)

        await wait_until(has_priority, what=f"priority {priority}")

    async def wait_condition(self, condition: str, message: str) -> None:
        """Wait until the status of the object says this."""
        where = ("-n", self.site.namespace, plural(NEW), "people")
        command = ("wait", f"--for=condition={condition}", "--timeout=60s", *where)
        await asyncio.to_thread(self.site.plane.kubectl, *command)
        assert message in self.site.plane.kubectl("get", *where, "-o", "yaml")

    async def first_of(self, *, named_first: bool) -> str:
        """Return which of two waiting requests goes first. One of them names `people`. With `named_first`
        this request comes first.
        """
        async with AsyncExitStack() as stack:
            tasks = await self.wait_behind_one(stack, named=(named_first, not named_first))
            self.site.servers.running = 0
            await asyncio.gather(*tasks.values())
            went_at = [(await self.decision(number))["at_unix_s"] for number in tasks]
            named_went_first = (went_at[0] < went_at[1]) == named_first
            return "named" if named_went_first else "nameless"

    async def wait_behind_one(
        self, stack: AsyncExitStack, *, named: Sequence[bool]
    ) -> dict[int, asyncio.Task[StreamExchange]]:
        """Keep the server busy with one request, then begin requests that wait. `named` says for each request
        whether it names `people`. Return the requests by number.
        """
        servers = self.site.servers
        servers.running, before = 1, servers.looks
        await wait_until(lambda: servers.looks > before + 1, what="the picker sees that the server is busy")
        await (await self._begin(stack, named=False))
        tasks = {}
        for each in named:
            task = await self._begin(stack, named=each)
            tasks[self._asked] = task
            await self._wait_waiting(len(tasks))
        return tasks

    async def _begin(
        self, stack: AsyncExitStack, *, named: bool, group: str = NEW
    ) -> asyncio.Task[StreamExchange]:
        """Begin a request. The task ends with the picker's answer. The client leaves when the stack ends."""
        self._asked += 1
        one = await stack.enter_async_context(exchange(self._channel, mode=DUPLEX))
        body = json.dumps({"model": "m", "prompt": f"{self._asked} " * 80}).encode()
        headers = [("x-request-id", f"r{self._asked}")]
        if named:
            headers.append((HEADERS[group], "people"))
        return asyncio.create_task(one.send(body, headers=headers))

    async def decision(self, number: int) -> dict[str, Any]:
        decision = await self.site.picker.decision(f"r{number}")
        assert decision is not None
        return decision

    async def _wait_waiting(self, count: int) -> None:
        async def all_wait() -> bool:
            return await self.site.picker.metric("epp_flow_waiting_requests") == count

        await wait_until(all_wait, what=f"{count} requests wait")


@asynccontextmanager
async def site_gateway(plane: ControlPlane, namespace: str, folder: Path) -> AsyncIterator[SiteGateway]:
    for group in HEADERS:
        install_crd(plane, group)
    kubernetes = {"objectives": [NEW, OLD]}
    async with (
        running_site(plane, namespace, folder, servers=1, kubernetes=kubernetes) as site,
        grpc.aio.insecure_channel(f"unix:{folder}/picker.sock") as channel,
    ):
        site.policies.apply("p", **POLICY)
        await site.wait_policy("p")
        # The pod comes later than the policy: the picker takes a server's rate from the policy when the
        # server comes.
        await site.pool.add(site.hosts(1))
        await site.wait_addresses(f"{site.servers.host(0)}:{site.servers.port}")
        yield SiteGateway(site, channel)


async def test_priority_of_an_objective_decides_at_once_which_request_goes_first(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with site_gateway(cluster, namespace, tmp_path) as asked:
        assert await asked.first_of(named_first=False) == "nameless", "there is no such object"
        await asked.set_objective(10)
        await asked.wait_priority(10)
        await asked.wait_condition("Accepted=True", "requests that name it have priority 10")
        assert await asked.first_of(named_first=False) == "named"
        await asked.set_objective(-10)
        await asked.wait_priority(-10)
        assert await asked.first_of(named_first=True) == "nameless"
        await asked.set_objective(None)
        await asked.wait_priority(0)
        assert await asked.first_of(named_first=True) == "named"

        await asked.set_objective(7, group=OLD)
        await asked.wait_priority(7, group=OLD)
        await asked.set_objective(3)
        await asked.wait_priority(3, group=OLD)
        await asked.set_objective(None)
        await asked.wait_priority(7)
        assert await asked.first_of(named_first=False) == "named"


async def test_rewrites_are_followed_as_they_come_change_and_go(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    kind = "InferenceModelRewrite"
    install_crd(cluster, NEW, kind)
    where = ("-n", namespace, plural(NEW, kind), "r")
    kubernetes = {"rewrites": [NEW]}
    async with running_site(cluster, namespace, tmp_path, servers=1, kubernetes=kubernetes) as site:
        site.servers.models[site.servers.host(0)] = ["llama"]
        await site.pool.add(site.hosts(1))
        await site.wait_addresses(f"{site.servers.host(0)}:{site.servers.port}")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/picker.sock") as channel:

            async def answered(model: str) -> int:
                async with exchange(channel, mode=DUPLEX) as one:
                    await one.send(json.dumps({"model": model, "prompt": "x"}).encode())
                    return one.immediate.status if one.immediate else 200

            async def becomes(status: int) -> None:
                async def so() -> bool:
                    return await answered("gpt") == status

                await wait_until(so, what=f"a request for gpt gets {status}")

            await becomes(404)
            for target, accepted in (("llama", "True"), ("away", "False"), ("llama", "True")):
                spec = {
                    "poolRef": {"name": POOL},
                    "rules": [
                        {"matches": [{"model": {"value": "gpt"}}], "targets": [{"modelRewrite": target}]}
                    ],
                }
                document = {
                    "apiVersion": f"{NEW}/v1alpha2",
                    "kind": kind,
                    "metadata": {"name": "r"},
                    "spec": spec,
                }
                cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(document))
                await becomes(200 if target == "llama" else 404)
                condition = f"--for=condition=Accepted={accepted}"
                await asyncio.to_thread(cluster.kubectl, "wait", condition, "--timeout=60s", *where)
            cluster.kubectl("delete", *where)
            await becomes(404)
