"""The stand-in kubelet treats pods as a kubelet does, as far as our charts and tests rely on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.pods import TOOLS, Pods, container_status, eventually, is_ready, pod, python, shell
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.environment import ClusterTools
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import wait_until

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
HTTP_SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/" or os.path.exists("/shared" + self.path)
        self.send_response(200 if known else 503); self.end_headers(); self.wfile.write(os.environ["POD"].encode())
    def log_message(self, *arguments): pass
http.server.ThreadingHTTPServer(("", 80), Handler).serve_forever()
"""
POD_NAME = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


@pytest.fixture(scope="module")
def node(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(cluster, images=TOOLS, folder=tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def pods(cluster: ControlPlane, namespace: str, node: RunningNode) -> Pods:
    return Pods(cluster, namespace)


def serving_container(name: str, **fields: Any) -> dict[str, Any]:
    return python(
        "main", HTTP_SERVER, env=[POD_NAME], ports=[{"name": "http", "containerPort": 80}], **fields
    )


async def fetched(node: RunningNode, url: str) -> tuple[int, str]:
    connector = node.connector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return response.status, await response.text()


def gated(name: str) -> dict[str, Any]:
    """Return a pod that serves. It is ready as long as a file is in its volume `shared`."""
    probe = {"httpGet": {"path": "/open", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    mount = [{"name": "shared", "mountPath": "/shared"}]
    return pod(
        name,
        [serving_container(name, readinessProbe=probe, volumeMounts=mount)],
        labels={"app": "web"},
        volumes=[{"name": "shared", "emptyDir": {}}],
    )


def web_service(*, to: str | int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 8080, "targetPort": to}]},
    }


async def test_a_service_leads_to_the_pods_that_pass_their_readiness_probe(
    pods: Pods, node: RunningNode
) -> None:
    """Two pods listen on the same port of their own addresses. A file in each pod decides whether it is
    ready.
    """
    pods.apply(gated("first"), gated("second"), web_service(to="http"))
    ip = pods.plane.get("service", "web", "-n", pods.namespace)["spec"]["clusterIP"]
    for name in ("first", "second"):
        pods.wait(name, lambda p: "running" in container_status(p, "main")["state"], what=f"{name} runs")
    assert not any(is_ready(pods.get(name)) for name in ("first", "second"))
    with pytest.raises(aiohttp.ClientError):
        await fetched(node, f"http://{ip}:8080/")

    gates = {
        name: node.folder / "pods" / pods.get(name)["metadata"]["uid"] / "volumes" / "shared" / "open"
        for name in ("first", "second")
    }
    gates["first"].touch()
    await asyncio.to_thread(pods.wait_ready, "first")

    async def answering() -> set[str]:
        seen = set()
        for _ in range(20):
            try:
                seen.add((await fetched(node, f"http://{ip}:8080/"))[1])
            except aiohttp.ClientError:
                seen.add("refused")
        return seen

    async def until(wanted: set[str]) -> None:
        async def reached() -> bool:
            return await answering() == wanted

        await wait_until(reached, what=f"the Service leads to {wanted}", timeout_s=120)

    await until({"first"})
    gates["second"].touch()
    await until({"first", "second"})
    gates["first"].unlink()
    await until({"second"})


def test_a_failed_liveness_probe_restarts_the_container_after_startup(pods: Pods, node: RunningNode) -> None:
    """The first run of the container never passes its liveness probe. The second run passes, because the file
    for which the probe looks outlives the container.
    """
    mount = [{"name": "shared", "mountPath": "/shared"}]
    script = "if [ -e /shared/lives ]; then touch /shared/alive; fi; touch /shared/lives; trap 'exit 7' TERM; while true; do sleep 0.1; done"
    main = shell(
        "main",
        script,
        volumeMounts=mount,
        startupProbe={"exec": {"command": ["ls", "/shared/lives"]}, "periodSeconds": 1},
        livenessProbe={
            "exec": {"command": ["ls", "/shared/alive"]},
            "periodSeconds": 1,
            "failureThreshold": 2,
        },
    )
    pods.apply(pod("revived", [main], volumes=[{"name": "shared", "emptyDir": {}}]))
    found = pods.wait(
        "revived",
        lambda p: container_status(p, "main")["restartCount"] == 1 and is_ready(p),
        what="a restart",
    )
    status = container_status(found, "main")
    assert status["lastState"]["terminated"]["exitCode"] == 7
    assert status["lastState"]["terminated"]["containerID"] != status["containerID"]


def test_nothing_outlives_a_test_run_that_is_killed(
    cluster_tools: ClusterTools, tmp_path: Path, namespace: str
) -> None:
    """From outside, the test looks for the node's processes (containers included), its network namespaces and
    its mounts.
    """
    launcher = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tests.cluster.pods import TOOLS, Pods, pod, shell
        from tests.cluster_env.control_plane import ControlPlane
        from tests.cluster_env.environment import ClusterTools
        from tests.harness.kubelet.running import running_node

        folder = Path({str(tmp_path)!r})
        marker = {{"name": "LEFT_BEHIND", "value": {namespace!r}}}
        with (
            ControlPlane(ClusterTools(folder=Path({str(cluster_tools.folder)!r})), folder=folder) as plane,
            running_node(plane, images=TOOLS, folder=folder / "node"),
        ):
            pods = Pods(plane, "default")
            pods.apply(*(pod(name, [shell("main", "sleep 1000 & sleep 1000", env=[marker])]) for name in "ab"))
            pods.wait_ready("a", "b")
            print("ready", flush=True)
            sys.stdin.read()
    """)
    links = Path("/proc/net/dev").read_text().count("\n")
    with subprocess.Popen(
        [sys.executable, "-c", launcher],
        cwd=REPOSITORY,
        env={**os.environ, "LEFT_BEHIND": namespace},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        marked = marked_processes(f"LEFT_BEHIND={namespace}")
        networks = {network_of(pid) for pid in marked} - {network_of(os.getpid())}
        assert len(marked) >= 4 + 2 + 2 * 3, "control plane, kubelet, and a shell with two sleeps in each pod"
        assert len(networks) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: not marked_processes(f"LEFT_BEHIND={namespace}"), what="every process has ended")
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not networks & {network_of(pid) for pid in everyone}
    assert Path("/proc/net/dev").read_text().count("\n") == links
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def marked_processes(variable: str) -> list[int]:
    """Return the processes that were started with this variable and have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def network_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
