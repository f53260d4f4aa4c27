"""Starts a node from a test, talks to its pods, and harms them: `with running_node(plane, ...) as node`.

Invariant: however the test run ends, the kernel ends everything that the node started. The kubelet is process
1 of a PID namespace and dies with this process, and its mounts and networks are in namespaces that nothing
else holds.
"""

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from bench.demo.tether import tethered
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.cached_builds import say
from tests.harness.kubelet.images import REPOSITORY, Image
from tests.harness.kubelet.namespaces import Connection, NetworkNamespace
from tests.harness.kubelet.services import relay

START_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.05
_TOOLS: Final = ("ip", "nsenter", "unshare")


class NodeError(Exception):
    """The kubelet did not start, or died. The message ends with its log."""


class RunningNode:
    """A node that runs. Made by `running_node`."""

    def __init__(self, name: str, *, folder: Path, network: NetworkNamespace) -> None:
        self.name = name
        self.folder = folder
        self._network = network

    def connector(self, **options: Any) -> aiohttp.TCPConnector:
        """Return a connector for an aiohttp session that reaches pods and ClusterIPs like a client in the
        cluster.
        """
        return aiohttp.TCPConnector(
            socket_factory=lambda info: self._network.socket(info[0], info[1]), **options
        )

    async def connect(self, host: str, port: int, **options: Any) -> Connection:
        """Open a connection from the node's network, with options of `asyncio.open_connection`."""
        return await self._network.connect(host, port, **options)

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return `command` in a form that runs in the node's network and ends when this process ends."""
        own = f"/proc/{os.getpid()}/fd/{self._network.fd}"
        return tethered(["nsenter", f"--net={own}", "--", *command])

    @asynccontextmanager
    async def forwarded(self, port: int) -> AsyncIterator[int]:
        """Yield a port of this machine whose connections go to this port of the node. The program there has
        to end before the block does.
        """
        async with asyncio.TaskGroup() as relays:

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                relays.create_task(relay(reader, writer, self.connect("127.0.0.1", port)))

            async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
                yield server.sockets[0].getsockname()[1]

    def running(self) -> dict[str, list[str]]:
        """Return the containers that have a process, by namespace/name of their pod."""
        found: dict[str, list[str]] = _control(self.folder, "GET", "/")["pods"]
        return found

    def signal(self, pod: str, container: str, number: int) -> None:
        """Send a signal to the first process of a container from outside. `pod` is namespace/name."""
        query = urlencode({"pod": pod, "container": container, "number": number})
        _control(self.folder, "POST", f"/signal?{query}")

    def signal_child(self, pod: str, container: str, number: int, *, command: str) -> None:
        """Send a signal to those children of the first process whose command line contains `command`. Raise
        KeyError if there are none.
        """
        query = urlencode({"pod": pod, "container": container, "number": number, "child": command})
        _control(self.folder, "POST", f"/signal?{query}")

    def log(self, pod: str, container: str) -> str:
        """Return the output of a container over all its runs. `pod` is namespace/name."""
        path = self.folder / "logs" / f"{pod.replace('/', '_')}_{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # The path is relative to the folder, because a socket's name may have only 107 bytes.
        folder = os.open(self._path.parent, os.O_PATH)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


@contextmanager
def running_node(
    plane: ControlPlane,
    *,
    images: Mapping[str, Image],
    folder: Path,
    name: str = "node-1",
    addresses: int = 60_000,
) -> Iterator[RunningNode]:
    """Run a node of `plane` until the block ends. `folder` receives logs and the pods' files. After so many
    `addresses`, pods get those of pods that have ended. Raise NodeError if the node cannot be started.
    """
    _check_machine()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "node": name,
        "node_kubeconfig": str(plane.kubeconfig_for_node(name)),
        "proxy_kubeconfig": str(plane.kubeconfig_for_proxy()),
        "images": {"images": dict(images)},
        "addresses": addresses,
    }
    (folder / "kubelet.json").write_bytes(msgspec.json.encode(config))
    kubelet = [sys.executable, "-m", "tests.harness.kubelet", "--config", str(folder / "kubelet.json")]
    own_namespaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--propagation", "private")
    with (folder / "kubelet.log").open("ab") as log:
        process = subprocess.Popen(
            tethered(["unshare", *own_namespaces, "--", *kubelet]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    network: NetworkNamespace | None = None
    try:
        _wait((folder / "control.sock").exists, process=process, folder=folder)
        network = _network_of(process.pid, folder)
        yield RunningNode(name, folder=folder, network=network)
        if process.poll() is not None:
            raise NodeError(
                f"the kubelet ended with {process.returncode} while it was needed\n{_log_tail(folder)}"
            )
    finally:
        if sys.exception() is not None:
            say(f"the log of node {name} ends with\n{_log_tail(folder)}")
            for path in sorted((folder / "logs").glob("*.log")):
                say(f"{path.name} ends with\n{path.read_text(errors='replace')[-1000:]}")
        process.kill()
        process.wait()
        if network is not None:
            network.close()


def _check_machine() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NodeError(f"{' and '.join(missing)} not found; on Debian: apt-get install iproute2 util-linux")
    if os.geteuid() != 0:
        raise NodeError("namespaces, mounts and network devices need root; run these tests as root")


def _network_of(unshare_pid: int, folder: Path) -> NetworkNamespace:
    (kubelet,) = Path(f"/proc/{unshare_pid}/task/{unshare_pid}/children").read_text().split()
    fd = _control(folder, "GET", "/")["network_fd"]
    return NetworkNamespace(existing=Path(f"/proc/{kubelet}/fd/{fd}"))


def _control(folder: Path, method: str, path: str) -> Any:
    connection = _UnixConnection(folder / "control.sock")
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise KeyError(body.decode())
    return json.loads(body) if method == "GET" else None


def _wait(condition: Callable[[], bool], *, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise NodeError(f"the kubelet is not ready (status {process.returncode})\n{_log_tail(folder)}")
        time.sleep(_POLL_S)


def _log_tail(folder: Path) -> str:
    return (folder / "kubelet.log").read_text(errors="replace")[-4000:]
