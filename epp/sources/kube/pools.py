"""Follows the pools of the configuration and their pods, or the pods of a configured selector, and passes on
the endpoints of all of them as one list.

An endpoint is one target port of one pod that is Ready (`_ready`) and not terminating, named `pod:port`. Its
`incarnation` is the pod's uid together with values that change when a container of the port restarts. A new
incarnation means a cold cache. Of a pod only the endpoints are kept. An update that changes none of them has
no effect, so the status heartbeats of a thousand pods cause no work.

A changed selector or port of a pool starts a new watch of its pods. Until the new watch has listed its pods,
the endpoints of the old watch stay. The first list is passed on only when every pool is known, so that a
starting picker does not refuse the models of a pool that is listed a moment later. A pool that does not exist
counts as known, without endpoints. Changes are collected for `_GATHER_S` before they are passed on. So when a
thousand pods start at once, the picker gets a few lists of endpoints and not a thousand. Called by `cluster`.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from epp.base.errors import ConfigError
from epp.base.types import METRICS_PLACE, ROLES, Address, Endpoint, EndpointName, Role
from epp.config.sections import Kubernetes
from epp.request.client_names import MAX_NAME_CHARS
from epp.sources.kube.objects import Pod, Pool, PoolPort, PoolSelector, PoolSpec
from epp.sources.kube.reflector import Access, Collection

_log = logging.getLogger(__name__)

_POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_PODS: Final = "/api/v1/namespaces/{}/pods"
_GATHER_S: Final = 0.1
_MOST_ADAPTERS = 4096


class Found(NamedTuple):
    """An endpoint, and when its pod was created."""

    created: str
    endpoint: Endpoint


@dataclass(slots=True, eq=False)
class FollowedPool:
    """One pool and its pods."""

    name: str
    pool: Collection[Pool, PoolSpec]
    pods: Collection[Pod, Sequence[Found]]
    followed: PoolSpec = field(default_factory=PoolSpec)
    """The pool whose pods are followed. Without labels it has none."""
    task: asyncio.Task[None] | None = None
    """Follows the pods."""

    @property
    def known(self) -> bool:
        """Whether the pods of the current pool have been listed, or are known not to exist."""
        return self.pool.listed if self.task is None else self.pods.listed


@dataclass(slots=True, eq=False)
class Pools:
    """`on_endpoints` gets every new list, the names of the existing pools, and those of the pools in which a
    server is starting. `on_pool` is called when a pool comes, changes or goes.
    """

    access: Access
    settings: Kubernetes
    on_endpoints: Callable[[Sequence[Endpoint], frozenset[str], frozenset[str]], None]
    on_pool: Callable[[], None]
    settled: bool = False
    """Whether the first endpoints have been passed on."""
    _pools: list[FollowedPool] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _states: dict[tuple[str, str], bool] = field(default_factory=dict)
    """For each kind of object and pool, whether the API server lets us follow it."""

    def start(self) -> None:
        """Follow the pools. The pods of a configured selector are those of a pool that always exists."""
        selector, namespace = self.settings.selector, self.access.namespace
        for name in self.settings.names:
            each = FollowedPool(name, pool_named(name, namespace=namespace), pods_of(name, PoolSpec()))
            self._pools.append(each)
            if selector:
                ports = tuple(map(PoolPort, self.settings.target_ports))
                each.pool.found[each.name] = PoolSpec(PoolSelector(selector), ports)
                self._use(each)
            else:
                self._follow(each, each.pool, on_change=partial(self._use, each))
        self.access.start(self._hand_on, name="news of the endpoints")

    @property
    def existing(self) -> frozenset[str]:
        return frozenset(each.name for each in self._pools if each.pool.found)

    def _use(self, each: FollowedPool) -> None:
        """Follow the pods of the pool as it is now. The endpoints of the pods before stay until the new pods
        are listed.
        """
        pool, before = each.pool.found.get(each.name, PoolSpec()), each.pods
        labels = pool.selector.match_labels
        if not each.pool.found:
            _log.warning("InferencePool %s does not exist, so it has no endpoints", each.name)
        elif not labels:  # it would select every pod of the namespace, including the gateway's own pods
            _log.error("InferencePool %s selects nothing: its spec.selector has no labels", each.name)
        self.on_pool()
        self._changed.set()
        if pool == each.followed:
            return
        if each.task is not None:
            each.task.cancel()
            each.task = None
            self._report(each.name, each.pods.what, True)  # nobody needs them any more
        each.followed, each.pods = pool, pods_of(each.name, pool, namespace=self.access.namespace)
        if labels:
            each.pods.found.update(before.found)
            each.task = self._follow(each, each.pods, on_change=self._changed.set)

    def _follow(
        self, each: FollowedPool, objects: Collection[Any, Any], *, on_change: Callable[[], None]
    ) -> asyncio.Task[None]:
        access = replace(self.access, on_state=partial(self._report, each.name))
        return access.follow(objects, on_change=on_change, name=f"watch of the {objects.what} of {each.name}")

    def _report(self, pool: str, what: str, so: bool) -> None:  # noqa: FBT001 - the shape of a reflector's callback
        self._states[what, pool] = so
        self.access.on_state(what, all(so for (kind, _), so in self._states.items() if kind == what))

    async def _hand_on(self) -> None:
        """Pass on the endpoints when they have changed. The first list waits until all pools are known.
        Raises ConfigError if they cannot be used at the moment, as on a full disk.
        """
        handed_on: tuple[list[Endpoint], frozenset[str], frozenset[str]] | None = None
        self._changed.set()  # after a failure, the same endpoints are passed on again
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.settled or all(each.known for each in self._pools):
                starting = frozenset(each.name for each in self._pools if not all(each.pods.found.values()))
                news = united([each.pods.found for each in self._pools]), self.existing, starting
                if news != handed_on:
                    try:
                        self.on_endpoints(*news)
                    except OSError as error:
                        raise ConfigError(f"the new endpoints cannot be used yet: {error}") from error
                    handed_on, self.settled = news, True
            await asyncio.sleep(_GATHER_S)


def pool_named(name: str, *, namespace: str) -> Collection[Pool, PoolSpec]:
    # By name, as in the picker's Role: RBAC allows listing a single object.
    selectors = [("fieldSelector", f"metadata.name={name}")]
    path = _POOLS.format(namespace)
    return Collection("pool", Pool, path, read=lambda pool, _: pool.spec, selectors=selectors)


def pods_of(name: str, pool: PoolSpec, *, namespace: str = "") -> Collection[Pod, Sequence[Found]]:
    """Return the pods of a pool, each with its endpoints: one for each port. A pod that is starting has none
    yet.
    """
    selector = ",".join(f"{key}={value}" for key, value in sorted(pool.selector.match_labels.items()))
    selectors = ("labelSelector", selector), ("fieldSelector", "status.phase=Running")
    read = partial(_endpoints, name, pool_ports(pool))
    return Collection("pods", Pod, _PODS.format(namespace), read=read, selectors=selectors)


def _endpoints(pool: str, ports: Sequence[int], pod: Pod, _: object) -> Sequence[Found] | None:
    """Return the endpoints of a pod. There are none while it starts. None: it cannot serve."""
    host = _host(pod)
    if not host or not ports or pod.metadata.deletion_timestamp is not None:
        return None
    if not _ready(pod):
        return () if _starts(pod) else None
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
                pool=pool,
                adapters=adapters,
                incarnation=f"{pod.metadata.uid}/{_process(pod, port)}",
                metrics=metrics,
                role=role,
                rank=rank if front else None,
                behind=Address(host, front) if front else None,
            ),
        )
        for rank, port in enumerate(ports)
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


def _starts(pod: Pod) -> bool:
    """Return whether a container runs whose startup probe has not passed yet, so that the pod will be ready
    soon. A container that waits after a crash does not run, and one that has crashed may crash again.
    """
    containers = pod.status.container_statuses
    return any(c.started is False and "running" in c.state and not c.restart_count for c in containers)


def pool_ports(spec: PoolSpec) -> tuple[int, ...]:
    """Return the target ports, each once. Numbers that are not ports are left out."""
    return tuple(dict.fromkeys(port.number for port in spec.target_ports if 0 < port.number < 65_536))


def united(pools: Sequence[Mapping[str, Sequence[Found]]]) -> list[Endpoint]:
    """Return the endpoints of several pools, by name. Names and addresses are unique.

    Two pods can have the same address for a moment, or for long if a node died. And two watches can know
    two pods of the same name, an older and a younger one. The younger pod gets the name and the address. A
    pod that several pools select belongs to the first of them.
    """
    by_age = attrgetter("created", "endpoint.name")  # of one second by name, so that all pickers agree
    every = chain.from_iterable(servers for pool in reversed(pools) for servers in pool.values())
    by_name = {found.endpoint.name: found for found in sorted(every, key=by_age)}
    by_address = {found.endpoint.address: found.endpoint for found in sorted(by_name.values(), key=by_age)}
    return sorted(by_address.values(), key=lambda endpoint: endpoint.name)


def _port(text: str) -> int:
    """Return the port. 0: the text is not a port."""
    return int(text) if len(text) <= 5 and text.isascii() and text.isdigit() and int(text) < 65_536 else 0


def _host(pod: Pod) -> str:
    """Return the pod's primary address, in the spelling by which `Address` compares. Empty: it has none."""
    try:
        return str(ipaddress.ip_address(pod.status.pod_ip))
    except ValueError:
        return ""
