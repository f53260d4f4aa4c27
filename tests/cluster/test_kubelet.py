"""The stand-in kubelet treats pods as a kubelet does, as far as our charts and tests rely on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pods import TOOLS, Pods, container_status, eventually, is_ready, pod, shell
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.environment import ClusterTools
from tests.harness.kubelet.running import RunningNode, running_node

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def node(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(cluster, images=TOOLS, folder=tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def pods(cluster: ControlPlane, namespace: str, node: RunningNode) -> Pods:
    return Pods(cluster, namespace)


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
