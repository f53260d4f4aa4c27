"""One pod of the node: its place in the network, its containers in their order, and its reported status.

The order is that of Kubernetes: init containers one after another. One with restartPolicy Always (a sidecar)
only has to start before the next one. Then the other containers start together. The end runs backwards: first
the other containers together, then the sidecars from the last to the first, all within one grace period.
Called by the node, which runs `run` as a task.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tests.harness.kubelet import probes, variables
from tests.harness.kubelet.api import Api, ApiError, JsonObject
from tests.harness.kubelet.container import Container, Surroundings, now
from tests.harness.kubelet.images import Image, ImageTable
from tests.harness.kubelet.namespaces import NetworkNamespace
from tests.harness.kubelet.variables import ConfigError, Sources
from tests.harness.kubelet.volumes import PodVolumes

_OUR_CONDITIONS: Final = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
_REFRESH_S: Final = 1.0
_RETRY_S: Final = 1.0
_RECONCILE_S: Final = 10.0
_SIDECAR_GRACE_S: Final = 2.0
_DEFAULT_GRACE_S: Final = 30.0


class Node(Protocol):
    """The services of the node for a pod."""

    api: Api
    images: ImageTable
    network: NetworkNamespace
    address: str

    def hosts(self, namespace: str) -> str: ...

    def plug(self, pod: NetworkNamespace) -> str:
        """Connect a pod's namespace. Return the pod's address."""

    def unplug(self, address: str) -> None:
        """Take back the address of a pod that has ended."""


@dataclass(frozen=True, slots=True)
class _Objects:
    """ConfigMaps and Secrets of the pod's namespace."""

    api: Api
    namespace: str

    async def config_map(self, name: str) -> Mapping[str, bytes] | None:
        document = await self._get("configmaps", name)
        return None if document is None else variables.plain(document)

    async def secret(self, name: str) -> Mapping[str, bytes] | None:
        document = await self._get("secrets", name)
        return None if document is None else variables.decoded(document)

    async def _get(self, kind: str, name: str) -> JsonObject | None:
        try:
            return await self.api.get(f"/api/v1/namespaces/{self.namespace}/{kind}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise ConfigError(f"{kind} {name}: {error}") from error


class Pod:
    """One pod from its binding to its end."""

    def __init__(self, document: JsonObject, *, node: Node, folder: Path, logs: Path) -> None:
        self.document = document
        self._node = node
        self._folder = folder
        self._logs = logs
        self._network = NetworkNamespace()
        self._address = ""
        self._unplugged = False
        self._sources: Final[Sources] = _Objects(node.api, document["metadata"]["namespace"])
        self._volumes = PodVolumes(folder / "volumes", pod=document, api=node.api, sources=self._sources)
        spec = document["spec"]
        policy = spec.get("restartPolicy", "Always")
        self._init = [
            self._container(entry, restart=entry.get("restartPolicy") or _of_init(policy))
            for entry in spec.get("initContainers", [])
        ]
        self._main = [self._container(entry, restart=policy) for entry in spec["containers"]]
        self._sidecars = [c for c in self._init if c.spec.get("restartPolicy") == "Always"]
        self._conditions: dict[str, JsonObject] = {}
        self._started_at = now()
        self._changes = 0
        self._changed = asyncio.Event()
        self._terminating = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return f"{self.document['metadata']['namespace']}/{self.document['metadata']['name']}"

    @property
    def containers(self) -> list[Container]:
        return [*self._init, *self._main]

    def update(self, document: JsonObject) -> None:
        """Take in the API server's current version of the pod."""
        self.document = document
        self._volumes.changed(self._described())
        if document["metadata"].get("deletionTimestamp"):
            self._terminating.set()

    async def run(self) -> None:
        """Run the pod until it is deleted and has ended. If this task is cancelled, the pod has disappeared
        from the API server and is killed.
        """
        self._address = self._node.plug(self._network)
        self.write_hosts()
        helpers = [
            asyncio.create_task(self._report(), name=f"status of {self.name}"),
            asyncio.create_task(self._refresh(), name=f"volumes of {self.name}"),
        ]
        running = asyncio.create_task(self._run_containers(), name=f"containers of {self.name}")
        try:
            await self._terminating.wait()
            await self._terminate(running)
            self._unplug()  # before the pod is gone, so that the next one can have its address
            await self._remove()
        finally:
            for task in (*helpers, running, *self._tasks):
                task.cancel()
            for container in self.containers:
                container.kill(9)
            await asyncio.gather(*helpers, running, *self._tasks, return_exceptions=True)
            self._unplug()

    def _unplug(self) -> None:
        if not self._unplugged:
            self._unplugged = True
            self._network.close()
            self._node.unplug(self._address)

    def write_hosts(self) -> None:
        """Write the hosts file in place, because the containers see this very file."""
        metadata = self.document["metadata"]
        text = f"127.0.0.1 localhost\n{self._address} {metadata['name']}\n{self._node.hosts(metadata['namespace'])}"
        path = self._folder / "hosts"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+") as file:
            file.write(text)
            file.truncate()

    async def _run_containers(self) -> None:
        await self._prepare_volumes()
        for container in self._init:
            self._spawn(container)
            seen = self._changes
            while not (container.started if container in self._sidecars else container.over.is_set()):
                seen = await self._change_since(seen)
            if container not in self._sidecars and container.exit_code != 0:
                return  # the pod has failed
        for container in self._main:
            self._spawn(container)
        for container in self._main:
            await container.over.wait()
        if not self._terminating.is_set():  # all other containers have ended, so the sidecars end too
            await self._stop_sidecars(until=time.monotonic() + self._grace_s())

    async def _prepare_volumes(self) -> None:
        while True:
            try:
                return await self._volumes.prepare()
            except (ConfigError, ApiError):
                await asyncio.sleep(_RETRY_S)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            if any(container.pid for container in self.containers):
                try:
                    await self._volumes.prepare()
                except (ConfigError, ApiError):
                    continue  # existing files stay, as with a kubelet

    async def _terminate(self, running: asyncio.Task[None]) -> None:
        until = time.monotonic() + self._grace_s()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        begun = {container for container in self.containers if container.name in self._spawned()}
        mains = [c for c in self.containers if c in begun and c not in self._sidecars]
        await asyncio.gather(*(container.stop(until=until) for container in mains))
        await self._stop_sidecars(until=until, among=begun)

    async def _stop_sidecars(self, *, until: float, among: set[Container] | None = None) -> None:
        for container in reversed(self._sidecars):
            if among is None or container in among:
                await container.stop(until=max(until, time.monotonic() + _SIDECAR_GRACE_S))

    async def _remove(self) -> None:
        metadata = self.document["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        while True:
            try:
                return await self._node.api.delete(path, options)
            except ApiError as error:
                if error.status in {404, 409}:
                    return None
                await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        """Write the status after each change of it, and again if something else changed it. A write that
        failed is repeated later.
        """
        metadata = self.document["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        written: JsonObject = {}
        while True:
            seen = self._changes
            status = self.status()
            if status != written or self._contradicted():
                try:
                    await self._node.api.merge(path, {"metadata": {"uid": metadata["uid"]}, "status": status})
                    written = status
                except ApiError as error:
                    if error.status == 404:
                        return
                    await asyncio.sleep(_RETRY_S)
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONCILE_S):
                    await self._change_since(seen)

    def _contradicted(self) -> bool:
        """Tell whether the API server has another status, for example because the node controller did not
        hear of this node for a while.
        """
        types = {c["type"]: c["status"] for c in self.document["status"].get("conditions", [])}
        return any(types.get(kind, own["status"]) != own["status"] for kind, own in self._conditions.items())

    def status(self) -> JsonObject:
        """Return the status as a kubelet reports it."""
        phase = self._phase()
        initialized = all(c.started if c in self._sidecars else c.exit_code == 0 for c in self._init)
        ready = initialized and phase == "Running" and all(c.ready for c in [*self._main, *self._sidecars])
        values = {
            "PodReadyToStartContainers": True,
            "Initialized": initialized,
            "ContainersReady": ready,
            "Ready": ready,
        }
        for kind, value in values.items():
            self._set_condition(kind, value=value, completed=phase == "Succeeded")
        others = [
            c for c in self.document["status"].get("conditions", []) if c["type"] not in _OUR_CONDITIONS
        ]
        return {
            "phase": phase,
            "hostIP": self._node.address,
            "hostIPs": [{"ip": self._node.address}],
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "startTime": self._started_at,
            "conditions": [*others, *self._conditions.values()],
            "initContainerStatuses": [container.status() for container in self._init],
            "containerStatuses": [container.status() for container in self._main],
        }

    def _set_condition(self, kind: str, *, value: bool, completed: bool) -> None:
        text = "True" if value else "False"
        if self._conditions.get(kind, {}).get("status") != text:
            reason = {} if value else {"reason": "PodCompleted" if completed else "ContainersNotReady"}
            self._conditions[kind] = {"type": kind, "status": text, "lastTransitionTime": now(), **reason}

    def _phase(self) -> str:
        failed_init = any(
            c.over.is_set() and c.exit_code != 0 and c not in self._sidecars for c in self._init
        )
        if failed_init:
            return "Failed"
        if all(c.over.is_set() for c in self._main):
            return "Succeeded" if all(c.exit_code == 0 for c in self._main) else "Failed"
        return "Running" if any(c.pid or c.exit_code is not None for c in self._main) else "Pending"

    def _spawn(self, container: Container) -> None:
        self._tasks.append(asyncio.create_task(container.run(), name=container.name))

    def _spawned(self) -> set[str]:
        return {task.get_name() for task in self._tasks}

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_since(self, seen: int) -> int:
        """Wait while the count of changes is still `seen`. Return the count."""
        if self._changes == seen:
            await self._changed.wait()
        return self._changes

    def _grace_s(self) -> float:
        metadata, spec = self.document["metadata"], self.document["spec"]
        chosen = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds"))
        return _DEFAULT_GRACE_S if chosen is None else float(chosen)

    def _described(self) -> JsonObject:
        """Return the document, with the addresses that the API server may not have yet."""
        addresses = {
            "hostIP": self._node.address,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
        }
        return {**self.document, "status": {**self.document["status"], **addresses}}

    def _container(self, entry: JsonObject, *, restart: str) -> Container:
        image = self._node.images.pull(entry["image"])
        metadata = self.document["metadata"]

        def target(execute: Any) -> probes.Target:
            ports = {p["name"]: p["containerPort"] for p in entry.get("ports", []) if "name" in p}
            return probes.Target(self._node.network, self._address, ports, execute)

        async def plan() -> dict[str, Any]:
            assert image is not None
            return await self._plan(entry, image)

        surroundings = Surroundings(
            folder=self._folder / "containers" / entry["name"],
            log=self._logs / f"{metadata['namespace']}_{metadata['name']}_{entry['name']}.log",
            image=image,
            image_name=entry["image"],
            plan=plan,
            target=target,
            changed=self._note_change,
            grace_s=self._grace_s(),
        )
        return Container(entry, surroundings, restart=restart)

    async def _plan(self, entry: JsonObject, image: Image) -> dict[str, Any]:
        await self._volumes.prepare()
        pod = self._described()
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "HOSTNAME": pod["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            **image.variables,
        }
        resolved = await variables.resolve(entry, pod=pod, sources=self._sources, given=given)
        security = {**pod["spec"].get("securityContext", {}), **entry.get("securityContext", {})}
        uid = security.get("runAsUser", image.uid)
        if security.get("runAsNonRoot") and uid == 0:
            raise ConfigError("container has runAsNonRoot and image will run as root")
        groups = [security["fsGroup"]] if "fsGroup" in security else []
        return {
            "network_fd": self._network.fd,
            "host_name": pod["metadata"]["name"],
            "binds": self._binds(entry, image),
            "read_only_root": bool(security.get("readOnlyRootFilesystem")),
            "uid": uid,
            "gid": security.get("runAsGroup", 0 if uid == 0 else image.uid),
            "groups": groups,
            "capabilities": []
            if "ALL" in security.get("capabilities", {}).get("drop", [])
            else list(range(41)),
            "no_new_privileges": security.get("allowPrivilegeEscalation") is False,
            "directory": image.directory,
            "image_root": image.root,
            "variables": resolved,
            "command": _command(entry, image, resolved),
        }

    def _binds(self, entry: JsonObject, image: Image) -> list[JsonObject]:
        """Return the folders that the container sees. As in container runtimes outer folders come first: a
        volume at /tmp hides nothing below it.
        """
        binds = [
            *({"source": f, "target": f, "read_only": True} for f in image.folders),
            {"source": str(self._folder / "hosts"), "target": "/etc/hosts", "read_only": True},
            *(self._bind(mount) for mount in entry.get("volumeMounts", [])),
        ]
        return sorted(binds, key=lambda bind: len(Path(bind["target"]).parts))

    def _bind(self, mount: JsonObject) -> JsonObject:
        source = self._volumes.path(mount["name"])
        if mount.get("subPath"):
            source /= mount["subPath"]
            source = source.resolve()
        written = {v["name"] for v in self.document["spec"].get("volumes", []) if "emptyDir" in v}
        read_only = bool(mount.get("readOnly")) or mount["name"] not in written
        return {"source": str(source), "target": mount["mountPath"], "read_only": read_only}


def _of_init(policy: str) -> str:
    """Return the restart policy of an init container. One that failed runs again unless the pod's policy is
    Never.
    """
    return "Never" if policy == "Never" else "OnFailure"


def _command(entry: JsonObject, image: Image, resolved: Mapping[str, str]) -> list[str]:
    """Return the command of the container. The pod's command replaces the image's entrypoint and arguments.
    Its args replace only the arguments.
    """
    command: Sequence[str] = entry.get("command") or []
    arguments: Sequence[str] = entry.get("args") or []
    chosen = [*command, *arguments] if command else [*image.entrypoint, *(arguments or image.command)]
    return [variables.expand(part, resolved) for part in chosen]
