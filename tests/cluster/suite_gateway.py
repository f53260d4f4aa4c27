"""The smallest Gateway that the conformance suite of gateway-api-inference-extension accepts: a controller
that says Accepted to everything, and for each Gateway an Envoy with the filter and the load balancing policy
that istiod writes.

It follows Gateways, HTTPRoutes, InferencePools, Services and pods, and writes statuses and the files that
Envoy reads. Of a route it knows host names, path prefixes, and the first pool of each rule.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.dialects.shapes import DUPLEX, EXT_PROC
from tests.harness.data_plane import DESTINATION, LB
from tests.harness.envoy import ENVOY
from tests.harness.kubelet.api import Api, JsonObject
from tests.harness.kubelet.running import RunningNode
from tests.harness.processes import managed_process

CLASS: Final = "stand-in"
PORT: Final = 80
_CONTROLLER: Final = "prefix-gateway.dev/stand-in"
_GATEWAY_API: Final = "/apis/gateway.networking.k8s.io/v1"
_PATHS: Final = {
    "Gateway": f"{_GATEWAY_API}/gateways",
    "HTTPRoute": f"{_GATEWAY_API}/httproutes",
    "InferencePool": "/apis/inference.networking.k8s.io/v1/inferencepools",
    "Service": "/api/v1/services",
    "Pod": "/api/v1/pods",
}
_TYPE: Final = "type.googleapis.com/envoy"
_LB_POLICY: Final = f"{_TYPE}.extensions.load_balancing_policies"
_NOW: Final = "2026-01-01T00:00:00Z"
"""The time of every transition; a condition needs one, and the suite does not read it."""


@contextlib.asynccontextmanager
async def running_gateways(node: RunningNode, kubeconfig: Path, *, folder: Path) -> AsyncIterator[None]:
    """Create the class, and serve its Gateways in the network of the node until the block ends."""
    api = Api(kubeconfig)
    gateways = _Gateways(api, node, folder=folder)
    try:
        spec = {"controllerName": _CONTROLLER}
        await api.create(
            f"{_GATEWAY_API}/gatewayclasses",
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "GatewayClass",
                "metadata": {"name": CLASS},
                "spec": spec,
            },
        )
        accepted = {"status": {"conditions": _conditions("Accepted", generation=1)}}
        await api.merge(f"{_GATEWAY_API}/gatewayclasses/{CLASS}/status", accepted)
        async with contextlib.AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            serving = tasks.create_task(gateways.serve(stack))
            followers = [tasks.create_task(gateways.follow(kind)) for kind in _PATHS]
            try:
                yield
            finally:
                for task in (serving, *followers):
                    task.cancel()
    finally:
        await api.close()


class _Gateways:
    """What the cluster holds, and the Envoys made from it."""

    def __init__(self, api: Api, node: RunningNode, *, folder: Path) -> None:
        self._api = api
        self._node = node
        self._folder = folder
        self._known: dict[str, list[JsonObject]] = {kind: [] for kind in _PATHS}
        self._changed = asyncio.Event()
        self._addresses: dict[str, str] = {}
        self._written: dict[Path, str] = {}

    async def follow(self, kind: str) -> None:
        async for known in self._api.follow(_PATHS[kind]):
            self._known[kind] = list(known.values())
            self._changed.set()

    async def serve(self, stack: contextlib.AsyncExitStack) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for gateway in self._known["Gateway"]:
                name = gateway["metadata"]["name"]
                if name not in self._addresses:
                    self._addresses[name] = f"127.0.0.{len(self._addresses) + 2}"
                    await self._start(name, stack)
                self._write(name)
                await self._tell(gateway)

    async def _start(self, name: str, stack: contextlib.AsyncExitStack) -> None:
        directory = self._folder / name
        directory.mkdir(parents=True)
        self._write(name)
        dynamic = {
            f"{kind}_config": {"path_config_source": {"path": str(directory / f"{kind}.json")}}
            for kind in ("lds", "cds")
        }
        bootstrap = {"node": {"id": name, "cluster": name}, "dynamic_resources": dynamic}
        (directory / "envoy.json").write_text(json.dumps(bootstrap))
        options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
        command = self._node.inside([str(ENVOY), "--config-path", str(directory / "envoy.json"), *options])
        await stack.enter_async_context(managed_process(f"envoy-{name}", command, directory=directory))

    def _write(self, name: str) -> None:
        """Write the files of a Gateway that changed. Envoy reads a file when it is replaced."""
        routes = [route for route in self._known["HTTPRoute"] if name in _parents(route)]
        pools = {pool["metadata"]["name"]: pool for pool in self._known["InferencePool"]}
        used = [pools[pool] for pool in {_pool(rule) for rule in _rules(routes)} if pool in pools]
        clusters = [cluster for pool in used for cluster in self._clusters(pool)]
        listener = _listener(self._addresses[name], routes, pools)
        for kind, resources in (("cds", clusters), ("lds", [listener])):
            path = self._folder / name / f"{kind}.json"
            text = json.dumps({"resources": resources})
            if self._written.get(path) != text:
                self._written[path] = text
                path.with_suffix(".new").write_text(text)
                path.with_suffix(".new").rename(path)

    def _clusters(self, pool: JsonObject) -> Iterable[dict[str, Any]]:
        name, spec = pool["metadata"]["name"], pool["spec"]
        picker = spec["endpointPickerRef"]
        wanted = spec["selector"]["matchLabels"].items()
        servers = [
            (pod["status"]["podIP"], port["number"])
            for pod in self._known["Pod"]
            for port in spec["targetPorts"]
            if pod["status"].get("podIP") and wanted <= (pod["metadata"].get("labels") or {}).items()
        ]
        host = {"sources": [{"metadata": {"key": LB, "path": [{"key": DESTINATION}]}}]}
        chosen = {
            "@type": f"{_LB_POLICY}.override_host.v3.OverrideHost",
            "override_host_sources": host["sources"],
            "selected_host_key": {"key": LB, "path": [{"key": f"{DESTINATION}-served"}]},
            "fallback_policy": _policy("round_robin", {"@type": f"{_LB_POLICY}.round_robin.v3.RoundRobin"}),
        }
        speaks = _http2() if spec.get("appProtocol") == "kubernetes.io/h2c" else {}
        policy = {"load_balancing_policy": _policy("override_host", chosen)}
        yield _cluster(f"pool-{name}", servers) | policy | speaks
        services = [
            s["spec"]["clusterIP"] for s in self._known["Service"] if s["metadata"]["name"] == picker["name"]
        ]
        addresses = [(address, picker["port"]["number"]) for address in services]
        yield _cluster(f"picker-{name}", addresses) | _http2()

    async def _tell(self, gateway: JsonObject) -> None:
        """Write that this Gateway, its routes and their pools are accepted."""
        metadata = gateway["metadata"]
        here = {"name": metadata["name"], "namespace": metadata["namespace"]}
        conditions = _conditions("Accepted", "Programmed", generation=metadata["generation"])
        listeners = [
            {
                "name": listener["name"],
                "supportedKinds": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute"}],
                "attachedRoutes": 0,
                "conditions": _conditions(
                    "Accepted", "Programmed", "ResolvedRefs", generation=metadata["generation"]
                ),
            }
            for listener in gateway["spec"]["listeners"]
        ]
        address = {"type": "IPAddress", "value": self._addresses[metadata["name"]]}
        await self._status(gateway, conditions=conditions, addresses=[address], listeners=listeners)
        for route in self._known["HTTPRoute"]:
            if metadata["name"] not in _parents(route):
                continue
            generation = route["metadata"]["generation"]
            conditions = _conditions("Accepted", "ResolvedRefs", generation=generation)
            parents = [
                {"parentRef": reference, "controllerName": _CONTROLLER, "conditions": conditions}
                for reference in route["spec"]["parentRefs"]
            ]
            await self._status(route, parents=parents)
            used = {_pool(rule) for rule in _rules([route])}
            for pool in self._known["InferencePool"]:
                if pool["metadata"]["name"] in used:
                    generation = pool["metadata"]["generation"]
                    conditions = _conditions("Accepted", "ResolvedRefs", generation=generation)
                    others = [
                        parent
                        for parent in pool.get("status", {}).get("parents", [])
                        if parent["parentRef"]["name"] != here["name"]
                    ]
                    reference = {"group": "gateway.networking.k8s.io", "kind": "Gateway", **here}
                    parent = {"parentRef": reference, "conditions": conditions}
                    parents = sorted([*others, parent], key=lambda each: each["parentRef"]["name"])
                    await self._status(pool, parents=parents)

    async def _status(self, found: JsonObject, **status: Any) -> None:
        """Write what differs. An object may be gone meanwhile."""
        if all(found.get("status", {}).get(name) == value for name, value in status.items()):
            return
        metadata = found["metadata"]
        base, _, plural = _PATHS[found["kind"]].rpartition("/")
        path = f"{base}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}/status"
        found["status"] = found.get("status", {}) | status
        await self._api.merge(path, {"status": status})


def _conditions(*kinds: str, generation: int) -> list[dict[str, Any]]:
    return [
        {
            "type": kind,
            "status": "True",
            "reason": kind,
            "message": "",
            "observedGeneration": generation,
            "lastTransitionTime": _NOW,
        }
        for kind in kinds
    ]


def _parents(route: JsonObject) -> set[str]:
    return {reference["name"] for reference in route["spec"]["parentRefs"]}


def _rules(routes: Iterable[JsonObject]) -> list[JsonObject]:
    return [rule for route in routes for rule in route["spec"]["rules"] if rule.get("backendRefs")]


def _pool(rule: JsonObject) -> str:
    return str(rule["backendRefs"][0]["name"])


def _policy(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    full = f"envoy.load_balancing_policies.{name}"
    return {"policies": [{"typed_extension_config": {"name": full, "typed_config": config}}]}


def _cluster(name: str, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        for host, port in sorted(addresses)
    ]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {
        "@type": f"{_TYPE}.config.cluster.v3.Cluster",
        "name": name,
        "connect_timeout": "2s",
        "type": "STATIC",
        "load_assignment": assignment,
    }


def _http2() -> dict[str, Any]:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": f"{_TYPE}.{name}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {"typed_extension_protocol_options": {f"envoy.{name}": options}}


def _route(rule: JsonObject, pools: Mapping[str, JsonObject]) -> dict[str, Any]:
    pool = _pool(rule)
    opens = pool in pools and pools[pool]["spec"]["endpointPickerRef"].get("failureMode") == "FailOpen"
    overrides = {
        "failure_mode_allow": opens,
        "grpc_service": {"envoy_grpc": {"cluster_name": f"picker-{pool}"}},
        "processing_mode": dict(DUPLEX),
    }
    kind = f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    return {
        "match": {"prefix": rule["matches"][0]["path"]["value"]},
        "route": {"cluster": f"pool-{pool}", "timeout": "0s"},
        "typed_per_filter_config": {EXT_PROC: {"@type": kind, "overrides": overrides}},
    }


def _listener(address: str, routes: Iterable[JsonObject], pools: Mapping[str, JsonObject]) -> dict[str, Any]:
    lb = {"untyped": [LB]}
    ext_proc = {
        "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        # A filter has to name a picker. Each route names its own.
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
        "message_timeout": "5s",
        "metadata_options": {"receiving_namespaces": lb, "forwarding_namespaces": lb},
        "failure_mode_allow": True,
    }
    hosts: dict[str, list[JsonObject]] = {}
    for route in routes:
        for host in route["spec"].get("hostnames", ["*"]):
            hosts.setdefault(host, []).extend(_rules([route]))
    virtual = [
        {"name": host, "domains": [host], "routes": [_route(rule, pools) for rule in rules]}
        for host, rules in hosts.items()
    ]
    filters = [
        {"name": EXT_PROC, "typed_config": ext_proc},
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
        },
    ]
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": filters,
        # Envoy may read the listener's file before that of the clusters.
        "route_config": {"name": "routes", "virtual_hosts": virtual, "validate_clusters": False},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "@type": f"{_TYPE}.config.listener.v3.Listener",
        "name": "gateway",
        "address": {"socket_address": {"address": address, "port_value": PORT}},
        "filter_chains": [chain],
    }
