"""The kubelet of one node: `python -m tests.harness.kubelet --config FILE`, started by `running`.

Registers the node as system:node:NAME, renews its lease, follows the pods bound to it, and answers a test on
a unix socket (what runs, a signal for a container). All its files are in FILE's
folder. It must be process 1 of PID and mount namespaces of its own, so that the kernel ends every container
when it ends.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from tests.harness.kubelet.api import Api, ApiError
from tests.harness.kubelet.images import ImageTable
from tests.harness.kubelet.namespaces import NetworkNamespace, link, make_bridge, unlink
from tests.harness.kubelet.pod import Pod
from tests.harness.kubelet.services import Services

_BRIDGE: Final = "pods"
_LEASE_S: Final = 10
_RETRY_S: Final = 1.0
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CAPACITY: Final = {"cpu": "64", "memory": "512Gi", "pods": "500", "ephemeral-storage": "100Gi"}


class KubeletConfig(msgspec.Struct, frozen=True):
    """The configuration that `running` writes for the kubelet."""

    node: str
    node_kubeconfig: str
    proxy_kubeconfig: str
    images: ImageTable
    addresses: int
    """After so many addresses, pods get those of pods that have ended."""


class Kubelet:
    """The node: its network, its pods, and its reports to the API server."""

    def __init__(self, config: KubeletConfig, *, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.images = config.images
        self.api = Api(Path(config.node_kubeconfig))
        self.network = NetworkNamespace()
        self.address = "10.244.0.1"
        self._proxy_api = Api(Path(config.proxy_kubeconfig))
        server = urlsplit(self.api.url)
        assert server.hostname is not None
        assert server.port is not None
        self._services = Services(
            self._proxy_api,
            network=self.network,
            api_server=(server.hostname, server.port),
            names_changed=self._write_hosts,
        )
        self._pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._plugged = 0
        self._free: deque[str] = deque()
        """Addresses of pods that have ended."""

    async def run(self) -> None:
        """Run the node until the process ends."""
        make_bridge(self.network, _BRIDGE, address=self.address)
        (self.folder / "logs").mkdir(exist_ok=True)
        await self._register()
        await self._serve_control()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._services.run(), name="services")
            tasks.create_task(self._keep_lease(), name="lease")
            tasks.create_task(self._follow_pods(), name="pods")

    def hosts(self, namespace: str) -> str:
        return self._services.hosts(namespace)

    def plug(self, pod: NetworkNamespace) -> str:
        if self._plugged >= self.config.addresses and self._free:
            address = self._free.popleft()
        else:
            self._plugged += 1
            number = self._plugged + 255  # The ranges begin with 10.244.1.0.
            address = f"10.244.{number >> 8}.{number & 255}"
        link(self.network, pod, address=address, bridge=_BRIDGE)
        pod.ip(f"route add default via {self.address}")
        # Container runtimes set this value, so that users other than root can listen on port 80.
        pod.set("net/ipv4/ip_unprivileged_port_start", "0")
        return address

    def unplug(self, address: str) -> None:
        unlink(self.network, address)
        self._free.append(address)

    async def _register(self) -> None:
        name = self.config.node
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        with contextlib.suppress(ApiError):  # an earlier process may have created the node
            await self.api.create("/api/v1/nodes", node)
        stamp = _micro_time().partition(".")[0] + "Z"
        good = {"reason": "KubeletReady", "lastHeartbeatTime": stamp, "lastTransitionTime": stamp}
        kinds = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        status = {
            "capacity": _CAPACITY,
            "allocatable": _CAPACITY,
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [{"type": kind, "status": value, **good} for kind, value in kinds.items()],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "operatingSystem": "linux", "architecture": "amd64"}
            | dict.fromkeys(
                ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion"),
                "",
            )
            | {"kubeProxyVersion": ""},
        }
        await self.api.merge(f"/api/v1/nodes/{name}/status", {"status": status})

    async def _keep_lease(self) -> None:
        name = self.config.node
        while True:
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _micro_time()}
            try:
                await self.api.merge(f"{_LEASES}/{name}", {"spec": spec})
            except ApiError as error:
                if error.status == 404:
                    lease = {"metadata": {"name": name}, "spec": spec}
                    with contextlib.suppress(ApiError):
                        await self.api.create(_LEASES, lease)
                else:
                    await asyncio.sleep(_RETRY_S)
                    continue
            await asyncio.sleep(_LEASE_S)

    async def _follow_pods(self) -> None:
        selector = f"spec.nodeName={self.config.node}"
        async for known in self.api.follow("/api/v1/pods", fieldSelector=selector):
            for uid, document in known.items():
                if uid in self._pods:
                    self._pods[uid].update(document)
                elif document["status"].get("phase") not in {"Succeeded", "Failed"}:
                    self._start(uid, Pod(document, node=self, folder=self._folder(uid), logs=self._logs))
                    self._pods[uid].update(document)
                elif document["metadata"].get("deletionTimestamp"):
                    await self._forget(document["metadata"]["namespace"], document["metadata"]["name"])
            for uid in self._pods.keys() - known.keys():
                self._tasks[uid].cancel()

    def _start(self, uid: str, pod: Pod) -> None:
        self._pods[uid] = pod
        task = self._tasks[uid] = asyncio.create_task(pod.run(), name=pod.name)

        def over(ended: asyncio.Task[None]) -> None:
            del self._pods[uid], self._tasks[uid]
            if not ended.cancelled() and (error := ended.exception()):
                print(f"{pod.name}: {error!r}", file=sys.stderr, flush=True)

        task.add_done_callback(over)

    async def _forget(self, namespace: str, name: str) -> None:
        """Remove everything that an earlier process of this node left."""
        with contextlib.suppress(ApiError):
            await self.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0})

    def _folder(self, uid: str) -> Path:
        return self.folder / "pods" / uid

    @property
    def _logs(self) -> Path:
        return self.folder / "logs"

    def _write_hosts(self) -> None:
        for pod in self._pods.values():
            pod.write_hosts()

    async def _serve_control(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/", self._show), web.post("/signal", self._signal)])
        runner = web.AppRunner(app)
        await runner.setup()
        # The file comes by rename, so that a process that sees it can connect to it.
        await web.UnixSite(runner, "control.part").start()
        (self.folder / "control.part").rename(self.folder / "control.sock")

    async def _show(self, request: web.Request) -> web.Response:
        pods = {
            pod.name: [c.name for c in pod.containers if c.pid is not None] for pod in self._pods.values()
        }
        return web.json_response({"network_fd": self.network.fd, "pods": pods})

    async def _signal(self, request: web.Request) -> web.Response:
        wanted = request.query
        for pod in self._pods.values():
            for container in pod.containers:
                if (pod.name, container.name) == (wanted["pod"], wanted["container"]) and container.pid:
                    if "child" in wanted:
                        return _signal_children(container.pid, wanted["child"], int(wanted["number"]))
                    container.kill(int(wanted["number"]))
                    return web.Response(text=str(container.pid))
        raise web.HTTPNotFound(text=f"{wanted['container']} of {wanted['pod']} does not run")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signal_children(pid: int, command: str, number: int) -> web.Response:
    """Send a signal to the children of a process whose command line contains `command`. Words of the command
    line are separated by spaces. A child that has the parent's command line does not run its own yet.
    """
    hit, parents = [], Path(f"/proc/{pid}/cmdline").read_bytes()
    for child in _children(pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            if line != parents and command in line.replace(b"\0", b" ").decode():
                os.kill(child, number)
                hit.append(str(child))
    if not hit:
        raise web.HTTPNotFound(text=f"process {pid} has no child that runs {command}")
    return web.Response(text=" ".join(hit))


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _main(config: KubeletConfig, *, folder: Path) -> None:
    await Kubelet(config, folder=folder).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    path: Path = parser.parse_args().config
    config = msgspec.json.decode(path.read_bytes(), type=KubeletConfig)
    os.chdir(path.parent)  # a socket's name may have only 107 bytes, and the path of this folder may be long
    asyncio.run(_main(config, folder=path.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
