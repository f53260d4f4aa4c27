"""Turns pods and ports into endpoints: which servers exist, with name, address and process.

Pure. The reflector of the pods passes them in, and the caller asks for the endpoints when something has
changed. Of a pod only the endpoints are kept. An update that changes none of them has no effect, so the
status heartbeats of a thousand pods cause no work.

An endpoint is one target port of one pod that is Ready (`_ready`) and not terminating, named `pod:port`. Its
`incarnation` is the pod's uid together with values that change when a container of the port restarts. A new
incarnation means a cold cache.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from epp.base.types import METRICS_PLACE, ROLES, Address, Endpoint, EndpointName, Role
from epp.request.client_names import MAX_NAME_CHARS
from epp.sources.kube.objects import Pod, Pool

AddressFamily = Literal["Primary", "IPv4", "IPv6"]
_MOST_ADAPTERS = 4096
_VERSIONS: Mapping[AddressFamily, int] = {"IPv4": 4, "IPv6": 6}


class Found(NamedTuple):
    """An endpoint, and when its pod was created."""

    created: str
    endpoint: Endpoint


class Discovery:
    """The pods of one pool by name. Each of `ports` is an endpoint of every pod. `changed` is true until the
    endpoints have been asked for.
    """

    def __init__(self, *, pool: str, family: AddressFamily, ports: Sequence[int]) -> None:
        self._pool = pool
        self._family = family
        self._ports = ports
        self._servers: dict[str, Sequence[Found]] = {}
        self.changed = True

    def replace(self, pods: Iterable[Pod]) -> None:
        servers = {pod.metadata.name: found for pod in pods if (found := self._endpoints(pod))}
        if servers != self._servers:
            self._servers = servers
            self.changed = True

    def put(self, pod: Pod) -> None:
        found = self._endpoints(pod)
        if not found:
            self.remove(pod)
        elif self._servers.get(pod.metadata.name) != found:
            self._servers[pod.metadata.name] = found
            self.changed = True

    def remove(self, pod: Pod) -> None:
        if self._servers.pop(pod.metadata.name, None) is not None:
            self.changed = True

    def found(self) -> Sequence[Found]:
        """Return an endpoint for each port of each server. `united` makes names and addresses unique."""
        self.changed = False
        return [*chain.from_iterable(self._servers.values())]

    def check_integrity(self) -> None:
        changed, endpoints = self.changed, united([self.found()])
        assert len({e.name for e in endpoints}) == len(endpoints) == len({e.address for e in endpoints})
        assert len(endpoints) <= len(self._servers) * len(self._ports)
        self.changed = changed

    def _endpoints(self, pod: Pod) -> Sequence[Found]:
        """Return the endpoints of a pod. There are none if the pod gets no requests now."""
        host = _host(pod, self._family)
        if not _ready(pod) or not host or pod.metadata.deletion_timestamp is not None:
            return ()
        annotations = pod.metadata.annotations
        model = annotations.model if len(annotations.model) <= MAX_NAME_CHARS else ""
        adapters = _adapters(annotations.adapters)
        # An invalid place is ignored: the page is then expected at the same place as the others'.
        metrics = annotations.metrics if METRICS_PLACE.fullmatch(annotations.metrics) else ""
        # If the pod has a front, the target ports are data parallel ranks. Else each is a whole server.
        front = _port(annotations.data_parallel_port)
        role = ROLES.get(pod.metadata.labels.role, Role.UNSAID)
        return [
            Found(
                pod.metadata.creation_timestamp,
                Endpoint(
                    name=EndpointName(f"{pod.metadata.name}:{port}"),
                    address=Address(host, port),
                    model=model,
                    pool=self._pool,
                    adapters=adapters,
                    incarnation=f"{pod.metadata.uid}/{_process(pod, port)}",
                    metrics=metrics,
                    role=role,
                    rank=rank if front else None,
                    behind=Address(host, front) if front else None,
                ),
            )
            for rank, port in enumerate(self._ports)
        ]


def _process(pod: Pod, port: int) -> str:
    """Return a text that changes when a container that may serve the port restarts. Pickers of all releases
    say the same, because they tell each other of which process they speak.
    """
    starts = {s.name: f"{s.restart_count}/{s.container_id}" for s in pod.status.container_statuses}
    serving = {p.container_port: c.name for c in pod.spec.containers for p in c.ports}
    if (start := starts.get(serving.get(port, ""))) is not None:
        return start
    # No container declares the port, which is legal, so any container may serve it.
    return " ".join(f"{name}={start}" for name, start in sorted(starts.items()))


def _adapters(text: str) -> frozenset[str]:
    """Return adapters that a request can name. Adapters beyond the number that a server can hold are left
    out.
    """
    names = (name.strip() for name in text.split(",", _MOST_ADAPTERS)[:_MOST_ADAPTERS])
    return frozenset(name for name in names if 0 < len(name) <= MAX_NAME_CHARS)


def _ready(pod: Pod) -> bool:
    """Return whether the pod is ready, as its own kubelet last reported, for the pod or for its parts.

    If the node controller loses contact with a node, it sets Ready to false on all pods of that node, and
    changes nothing else. If the pods still serve, for example because only the control plane was away, all
    endpoints would be gone at once. If they do not serve, their scrapes fail and they get no requests anyway.
    """
    statuses = {c.type: c.status for c in pod.status.conditions}
    parts = ("ContainersReady", *(gate.condition_type for gate in pod.spec.readiness_gates))
    return statuses.get("Ready") == "True" or all(statuses.get(part) == "True" for part in parts)


def pool_ports(pool: Pool) -> tuple[int, ...]:
    """Return the target ports, each once. Numbers that are not ports are left out."""
    return tuple(dict.fromkeys(port.number for port in pool.spec.target_ports if 0 < port.number < 65_536))


def united(pools: Sequence[Sequence[Found]]) -> list[Endpoint]:
    """Return the endpoints of several pools, by name. Names and addresses are unique.

    Two pods can have the same address for a moment, or for long if a node died. And two watches can know
    two pods of the same name, an older and a younger one. The younger pod gets the name and the address. A
    pod that several pools select belongs to the first of them.
    """
    by_age = sorted(chain.from_iterable(reversed(pools)), key=lambda found: found.created)
    by_name = {found.endpoint.name: found for found in by_age}
    by_age = sorted(by_name.values(), key=lambda found: found.created)
    by_address = {found.endpoint.address: found.endpoint for found in by_age}
    return sorted(by_address.values(), key=lambda endpoint: endpoint.name)


def _port(text: str) -> int:
    """Return the port. 0: the text is not a port."""
    return int(text) if len(text) <= 5 and text.isascii() and text.isdigit() and int(text) < 65_536 else 0


def _host(pod: Pod, family: AddressFamily) -> str:
    """Return the pod's address of this family, in the spelling by which `Address` compares. A pod without
    such an address is reached at its primary address.
    """
    addresses = [ip for text in (pod.status.pod_ip, *(p.ip for p in pod.status.pod_ips)) if (ip := _ip(text))]
    wanted = _VERSIONS.get(family)
    for ip in addresses:
        if wanted in (None, ip.version):
            return str(ip)
    return str(addresses[0]) if addresses else ""


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
