"""Pods that a test plays by itself, on a real API server. The test makes the pods, reports them Ready,
restarts and deletes them as a kubelet would. Each pod's server has its own loopback address. One process
answers at all addresses with a metrics page, so a picker can find and scrape as many servers as a test wants.
`Policies` applies and reads PrefixRoutingPolicies. `picker_account` makes the account that the chart gives
to a picker.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import web

from epp.config.policy import API_VERSION, KIND
from epp.config.sections import Kubernetes
from epp.sources.kube.api import Api, ApiError
from epp.sources.kube.objects import PLURAL
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import await_established, await_success
from tests.harness.listening import WebServer
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.role import rules
from tests.reference.crd import crd_yaml

POOL: Final = "vllm"
_AT_ONCE: Final = 32
_CREATED: Final = "2026-01-01T00:00:00Z"


def install_policy_crd(plane: ControlPlane) -> None:
    """Apply the CRD of the policy and wait until the API server serves it, which is a moment later than the
    CRD's status says.
    """
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=crd_yaml())
    name = next(yaml.safe_load_all(crd_yaml()))["metadata"]["name"]
    await_established(plane, f"crd/{name}")
    await_success(plane, "get", PLURAL, "--all-namespaces")


def picker_account(
    plane: ControlPlane, namespace: str, *, name: str = "picker", pools: Sequence[str] = (POOL,)
) -> Path:
    """Make a service account with the picker's rules and no others. Return its kubeconfig."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": list(rules(pools=pools)),
    }
    plane.kubectl("create", "serviceaccount", name, "-n", namespace)
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    plane.kubectl(
        *("create", "rolebinding", name, f"--role={name}", f"--serviceaccount={namespace}:{name}"),
        *("-n", namespace),
    )
    return plane.kubeconfig_for(name, namespace=namespace)


class Servers:
    """Model servers as scrapes see them. Each has its own address, 127.1.x.y, and all have the same page.

    `models` holds, by address, the models that a server lists at `/v1/models`. The other servers do not
    answer there.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.models: dict[str, Sequence[str]] = {}

    def host(self, number: int) -> str:
        return f"127.1.{number // 250}.{number % 250 + 1}"

    async def list_models(self, request: web.Request) -> web.Response:
        models = self.models.get((request.host or "").partition(":")[0])
        if models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    async def page(self, _: web.Request) -> web.Response:
        lines = {
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:prefix_cache_queries_total": 0,
            "vllm:prefix_cache_hits_total": 0,
        }
        return web.Response(text="".join(f'{name}{{engine="0"}} {value}\n' for name, value in lines.items()))


@asynccontextmanager
async def running_servers(count: int) -> AsyncIterator[Servers]:
    """Run so many servers on one free port."""
    servers = Servers(free_port())
    application = web.Application()
    application.router.add_get("/metrics", servers.page)
    application.router.add_get("/v1/models", servers.list_models)
    server = WebServer(application)
    try:
        for number in range(count):
            await server.listen(servers.host(number), servers.port)
        yield servers
    finally:
        await server.stop()


class SimulatedPool:
    """One or more InferencePools with pods, in a namespace. Made by `simulated_pool`."""

    def __init__(self, api: Api, *, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._core = f"/api/v1/namespaces/{namespace}"
        self._pools = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"

    async def create(
        self, *, ports: Iterable[int], labels: Mapping[str, str] | None = None, name: str = POOL
    ) -> None:
        """Create the InferencePool."""
        body = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": {"app": "vllm", **(labels or {})}},
                "targetPorts": [{"number": port} for port in ports],
                "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
            },
        }
        await self.api.request("POST", self._pools, body=body)

    async def change(self, spec: Mapping[str, Any]) -> None:
        """Merge `spec` into the InferencePool's spec."""
        await self.api.request("PATCH", f"{self._pools}/{POOL}", body={"spec": spec})

    async def delete(self, name: str = POOL) -> None:
        await self.api.request("DELETE", f"{self._pools}/{name}")

    async def add(
        self, hosts: Mapping[str, str], *, labels: Mapping[str, str] | None = None, started: bool = True
    ) -> None:
        """Add pods by name, Ready at their addresses, or with a startup probe that has not passed yet."""
        await _each(
            hosts, lambda name: self.api.request("POST", f"{self._core}/pods", body=self._pod(name, labels))
        )
        await self.report(hosts, ready=started, started=started)

    async def report(self, hosts: Mapping[str, str], *, ready: bool = True, started: bool = True) -> None:
        """Report the status that a kubelet reports of running pods."""
        await _each(hosts, lambda name: self._report(name, hosts[name], ready=ready, started=started))

    async def remove(self, names: Iterable[str]) -> None:
        query = (("gracePeriodSeconds", "0"),)
        await _each(names, lambda name: self.api.request("DELETE", f"{self._core}/pods/{name}", query=query))

    def _pod(self, name: str, labels: Mapping[str, str] | None) -> Mapping[str, Any]:
        """Return a pod of the usual size of a model server's pod, so that measured figures are realistic."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"app": "vllm", **(labels or {})},
            },
            "spec": {
                "schedulerName": "the-test",
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "vllm",
                        "image": "vllm",
                    }
                ],
            },
        }

    async def _report(self, name: str, host: str, *, ready: bool, started: bool) -> None:
        now = "True" if ready else "False"
        container = {
            "name": "vllm",
            "image": "vllm",
            "imageID": "vllm@sha256:0",
            "containerID": f"containerd://{name}",
            "ready": ready,
            "started": started,
            "restartCount": 0,
            "state": {"running": {"startedAt": _CREATED}},
        }
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [
                {"type": kind, "status": now, "lastTransitionTime": _CREATED}
                for kind in ("ContainersReady", "Ready")
            ],
            "containerStatuses": [container],
        }
        await self.api.request(
            "PATCH",
            f"{self._core}/pods/{name}/status",
            body={"status": status},
        )


async def _each(names: Iterable[str], act: Any) -> None:
    """Call `act` for a few dozen pods at a time, as many kubelets would."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        async with turns:
            await act(name)

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))


@asynccontextmanager
async def simulated_pool(plane: ControlPlane, namespace: str) -> AsyncIterator[SimulatedPool]:
    """Make the pool as the administrator. The InferencePool itself does not exist yet."""
    api = await Api.connect(Kubernetes(pool=POOL, kubeconfig=str(plane.kubeconfig)))
    try:
        yield SimulatedPool(api, namespace=namespace)
    finally:
        await api.close()


def policy_document(name: str, **spec: Any) -> str:
    """Return a PrefixRoutingPolicy for the pool, for kubectl."""
    return json.dumps(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {"targetRef": {"name": POOL}, **spec},
        }
    )


class Policies:
    """The policies of a namespace, as an operator sees them."""

    def __init__(self, plane: ControlPlane, pool: SimulatedPool) -> None:
        self._plane = plane
        self._pool = pool
        self._path = f"/apis/{API_VERSION}/namespaces/{pool.namespace}/{PLURAL}"

    def apply(self, name: str, **spec: Any) -> str:
        """Apply the policy with kubectl."""
        return self._plane.kubectl(
            "apply", "-n", self._pool.namespace, "-f", "-", stdin=policy_document(name, **spec)
        )

    async def read(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(await self._pool.api.request("GET", f"{self._path}/{name}"))
        return document

    async def delete(self, name: str) -> None:
        await self._pool.api.request("DELETE", f"{self._path}/{name}")

    async def conditions(self, name: str) -> tuple[str, ...]:
        """Return its conditions in words, such as `Accepted=True/Accepted@2`. Return none if there is no
        status or no object.
        """
        try:
            status = (await self.read(name)).get("status", {})
        except ApiError:
            return ()
        return tuple(
            f"{c['type']}={c['status']}/{c['reason']}@{c.get('observedGeneration', 0)}"
            for c in status.get("conditions", ())
        )

    async def wait_conditions(self, name: str, *words: str) -> None:
        """Wait until its conditions are these."""
        seen: tuple[str, ...] = ()

        async def has_conditions() -> bool:
            nonlocal seen
            seen = await self.conditions(name)
            return seen == words

        try:
            await wait_until(has_conditions, what=f"policy {name} says {words}")
        except AssertionError as error:
            raise AssertionError(f"policy {name} says {seen}, not {words}") from error
