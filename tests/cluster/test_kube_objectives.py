"""llm-d's objects on a real API server: InferenceObjectives of both API groups give requests their priority,
and InferenceModelRewrites say which model answers. Changes apply at once, and each object gets its status.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import await_established
from tests.harness.data_plane import DUPLEX, exchange
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import POOL
from tests.harness.site import Site, running_site

pytestmark = [pytest.mark.cluster]

NEW: Final = "llm-d.ai"
OLD: Final = "inference.networking.x-k8s.io"
HEADERS: Final = {NEW: "x-llm-d-inference-objective", OLD: "x-gateway-inference-objective"}


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
    await_established(plane, f"crd/{plural(group, kind)}")


class SiteGateway:
    """The picker of the site as a gateway uses it, and the object that the test applies."""

    def __init__(self, site: Site, channel: grpc.aio.Channel, kind: str) -> None:
        self._site = site
        self._channel = channel
        self._kind = kind
        self._asked = 0

    def apply(self, spec: dict[str, Any], *, group: str = NEW) -> None:
        pool = {"poolRef": {"group": "inference.networking.k8s.io", "name": POOL}}
        document = {
            "apiVersion": f"{group}/v1alpha2",
            "kind": self._kind,
            "metadata": {"name": "people"},
            "spec": pool | spec,
        }
        self._kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def delete(self) -> None:
        self._kubectl("delete", plural(NEW, self._kind), "people")

    async def wait_condition(self, accepted: str, message: str = "") -> None:
        """Wait until the status of the object says this."""
        there = (plural(NEW, self._kind), "people")
        condition = f"--for=condition=Accepted={accepted}"
        await asyncio.to_thread(self._kubectl, "wait", condition, "--timeout=60s", *there)
        assert message in self._kubectl("get", *there, "-o", "yaml")

    async def wait_priority(self, priority: int, *, group: str = NEW) -> None:
        """Wait until a request that names the objective has this priority."""

        async def has_priority() -> bool:
            await self._status("m", (HEADERS[group], "people"))
            decision = await self._site.picker.decision(f"r{self._asked}")
            return decision is not None and decision["priority"] == priority

        await wait_until(has_priority, what=f"priority {priority}")

    async def wait_status(self, status: int) -> None:
        """Wait until a request for the model `gpt` gets this answer of the picker. 200: it is routed."""

        async def so() -> bool:
            return await self._status("gpt") == status

        await wait_until(so, what=f"a request for gpt gets {status}")

    async def _status(self, model: str, *headers: tuple[str, str]) -> int:
        self._asked += 1
        async with exchange(self._channel, mode=DUPLEX) as one:
            body = json.dumps({"model": model, "prompt": "x"}).encode()
            await one.send(body, headers=[("x-request-id", f"r{self._asked}"), *headers])
            return one.immediate.status if one.immediate else 200

    def _kubectl(self, *words: str, stdin: str | None = None) -> str:
        verb, *rest = words
        return self._site.plane.kubectl(verb, "-n", self._site.namespace, *rest, stdin=stdin)


@asynccontextmanager
async def site_gateway(
    plane: ControlPlane, namespace: str, folder: Path, *, kind: str, model: str, **kubernetes: Any
) -> AsyncIterator[SiteGateway]:
    """Run a picker with one server that has this model."""
    for group in HEADERS:
        install_crd(plane, group, kind)
    async with (
        running_site(plane, namespace, folder, servers=1, kubernetes=kubernetes) as site,
        grpc.aio.insecure_channel(f"unix:{folder}/picker.sock") as channel,
    ):
        site.policies.apply("p", flow={"mode": "Hold"})  # without a queue no request has a priority
        await site.wait_policy("p")
        site.servers.models[site.servers.host(0)] = [model]
        await site.pool.add(site.hosts(1))
        await site.wait_addresses(f"{site.servers.host(0)}:{site.servers.port}")
        yield SiteGateway(site, channel, kind)


async def test_the_priority_of_an_objective_decides_for_requests_that_name_it(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    of_both = site_gateway(
        cluster, namespace, tmp_path, kind="InferenceObjective", model="m", objectives=[NEW, OLD]
    )
    async with of_both as asked:
        await asked.wait_priority(0)
        asked.apply({"priority": 10})
        await asked.wait_priority(10)
        await asked.wait_condition("True", "requests that name it have priority 10")
        asked.apply({"priority": -10})
        await asked.wait_priority(-10)
        asked.apply({"priority": 7}, group=OLD)
        await asked.wait_priority(-10, group=OLD)
        asked.delete()
        await asked.wait_priority(7)


async def test_rewrites_are_followed_as_they_come_change_and_go(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with site_gateway(
        cluster, namespace, tmp_path, kind="InferenceModelRewrite", model="llama", rewrites=[NEW]
    ) as asked:
        await asked.wait_status(404)
        for target, accepted in (("llama", "True"), ("away", "False"), ("llama", "True")):
            rule = {"matches": [{"model": {"value": "gpt"}}], "targets": [{"modelRewrite": target}]}
            asked.apply({"rules": [rule]})
            await asked.wait_status(200 if target == "llama" else 404)
            await asked.wait_condition(accepted)
        asked.delete()
        await asked.wait_status(404)
