"""ClusterIPs and service names for the pods of one node, in the place of kube-proxy and cluster DNS.

Each ClusterIP is an address of the node's network namespace. Connections to its ports are relayed to a ready
endpoint of the Service, chosen at random, over the same namespace. If none is ready, endpoints that still
serve while they terminate are used, as with kube-proxy. Names are lines of each pod's hosts file. TCP only.
"""

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.harness.kubelet.api import Api, JsonObject
from tests.harness.kubelet.namespaces import Connection, NetworkNamespace

Address = tuple[str, int]

_CHUNK_BYTES: Final = 65_536
_SLOW_S: Final = 5.0
"""Connections that take longer than this are in the node's log, which a failed test shows."""
_ZONE: Final = "svc.cluster.local"
_SERVICE_NAME: Final = "kubernetes.io/service-name"


@dataclass(slots=True)
class _Port:
    """One port of one ClusterIP."""

    server: asyncio.Server
    endpoints: list[Address] = field(default_factory=list)


class Services:
    """Follows Services and EndpointSlices, and keeps listeners and names equal to them."""

    def __init__(
        self, api: Api, *, network: NetworkNamespace, api_server: Address, names_changed: Callable[[], None]
    ) -> None:
        """`api_server` is the target of the Service `kubernetes`, outside the namespace."""
        self._api = api
        self._network = network
        self._api_server = api_server
        self._names_changed = names_changed
        self._services: dict[str, JsonObject] = {}
        self._slices: dict[str, JsonObject] = {}
        self._ports: dict[Address, _Port] = {}
        self._addresses: set[str] = set()
        self._names: list[tuple[str, str, str]] = []
        self._applying = asyncio.Lock()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow("/api/v1/services", self._set_services), name="services")
            tasks.create_task(
                self._follow("/apis/discovery.k8s.io/v1/endpointslices", self._set_slices), name="slices"
            )

    def hosts(self, namespace: str) -> str:
        """Return the lines of a hosts file for a pod of this namespace."""
        lines = []
        for address, name, of in self._names:
            # The name ends with a dot, because some programs ask for the fully qualified name.
            full = [f"{name}.{of}.{_ZONE}", f"{name}.{of}.{_ZONE}.", f"{name}.{of}.svc", f"{name}.{of}"]
            lines.append(f"{address} {' '.join(full + [name] * (of == namespace))}\n")
        return "".join(lines)

    async def _follow(self, path: str, use: Callable[[dict[str, JsonObject]], None]) -> None:
        async for known in self._api.follow(path):
            use(known)
            async with self._applying:
                await self._apply()

    def _set_services(self, known: dict[str, JsonObject]) -> None:
        self._services = known

    def _set_slices(self, known: dict[str, JsonObject]) -> None:
        self._slices = known

    async def _apply(self) -> None:
        wanted: dict[Address, list[Address]] = {}
        names: list[tuple[str, str, str]] = []
        for service in list(self._services.values()):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            address = service["spec"].get("clusterIP", "")
            if address in {"", "None"}:
                names += [(ip, name, namespace) for ip, _ in self._endpoints(service, port=None)]
                continue
            names.append((address, name, namespace))
            for port in service["spec"].get("ports", []):
                if port.get("protocol", "TCP") == "TCP":
                    wanted[address, port["port"]] = self._endpoints(service, port=port)
        self._close_others(wanted)
        for place, endpoints in wanted.items():
            if place not in self._ports:
                self._ports[place] = await self._open(place)
            self._ports[place].endpoints = endpoints
        if names != self._names:
            self._names = names
            self._names_changed()

    def _endpoints(self, service: JsonObject, *, port: JsonObject | None) -> list[Address]:
        """Return the endpoints of one port. Without a port, the ports of the endpoints are 0."""
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        ready: list[Address] = []
        serving: list[Address] = []
        for part in self._slices.values():
            metadata = part["metadata"]
            if metadata["namespace"] != namespace or metadata.get("labels", {}).get(_SERVICE_NAME) != name:
                continue
            for entry in part.get("ports") or [{}]:
                if port is not None and (entry.get("name") or "") != (port.get("name") or ""):
                    continue
                for endpoint in part.get("endpoints") or []:
                    places = [(ip, entry.get("port") or 0) for ip in endpoint["addresses"]]
                    conditions = endpoint.get("conditions", {})
                    if conditions.get("ready", True):
                        ready += places
                    elif conditions.get("serving", False):
                        serving += places
                if port is None:
                    break
        return ready or serving

    def _close_others(self, wanted: Mapping[Address, object]) -> None:
        for place in [place for place in self._ports if place not in wanted]:
            self._ports.pop(place).server.close()
        for address in self._addresses - {address for address, _ in wanted}:
            self._network.ip(f"address del {address}/32 dev lo")
            self._addresses.discard(address)

    async def _open(self, place: Address) -> _Port:
        if place[0] not in self._addresses:
            self._network.ip(f"address add {place[0]}/32 dev lo")
            self._addresses.add(place[0])
        listener = self._network.listen(*place)

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await relay(reader, writer, self._connect(place))

        return _Port(server=await asyncio.start_server(accepted, sock=listener))

    async def _connect(self, place: Address) -> Connection:
        if self._is_api_server(place):
            return await asyncio.open_connection(*self._api_server)
        port = self._ports.get(place)
        if port is None or not port.endpoints:
            raise ConnectionRefusedError(f"no endpoint for {place}")
        endpoint, began_at = random.choice(port.endpoints), time.monotonic()
        try:
            return await self._network.connect(*endpoint)
        finally:
            if (took_s := time.monotonic() - began_at) > _SLOW_S:
                print(f"{place}: {took_s:.0f} s to connect to {endpoint}", file=sys.stderr, flush=True)

    def _is_api_server(self, place: Address) -> bool:
        return any(
            service["spec"].get("clusterIP") == place[0]
            for service in self._services.values()
            if (service["metadata"]["namespace"], service["metadata"]["name"]) == ("default", "kubernetes")
        )


async def relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connecting: Awaitable[Connection]
) -> None:
    """Relay one connection in both directions until both sides have ended."""
    try:
        to_reader, to_writer = await connecting
    except OSError:
        _reset(writer)
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, to_writer))
            both.create_task(_pump(to_reader, writer))
    except* OSError:
        _reset(writer)
        _reset(to_writer)
    finally:
        for end in (writer, to_writer):
            end.close()
        for end in (writer, to_writer):
            with contextlib.suppress(OSError):
                await end.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close in such a way that the other side sees a failure."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
