"""The control plane that the cluster tests run on. It is a real control plane. After a fault none of its
processes stays.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane

pytest_plugins = ["pytester", "tests.cluster_env.fixtures"]

REPOSITORY = Path(__file__).parents[2]


def runs(pid: int) -> bool:
    """Tell whether a process has this id and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def inference_pool(name: str, *, port: int) -> str:
    spec = {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": port}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    return json.dumps(
        {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


@pytest.mark.cluster
def test_an_inference_pool_is_accepted_and_one_with_an_impossible_port_is_refused(
    cluster: ControlPlane, namespace: str
) -> None:
    cluster.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=inference_pool("good", port=8000))
    said = cluster.kubectl_fails(
        "apply", "--namespace", namespace, "-f", "-", stdin=inference_pool("bad", port=70_000)
    )
    assert "targetPorts" in said
    names = [item["metadata"]["name"] for item in cluster.get("inferencepool", "-n", namespace)["items"]]
    assert names == ["good"]


@pytest.mark.cluster
def test_a_service_account_may_do_only_what_its_role_says(cluster: ControlPlane, namespace: str) -> None:
    kubeconfig = cluster.kubeconfig_for("default", namespace=namespace)
    read = ("--kubeconfig", kubeconfig, "--namespace", namespace, "get", "pods")
    assert "forbidden" in cluster.kubectl_fails(*read)
    cluster.kubectl("create", "role", "reader", "--verb=get,list", "--resource=pods", "-n", namespace)
    cluster.kubectl(
        *("create", "rolebinding", "reader", "--role=reader", "-n", namespace),
        f"--serviceaccount={namespace}:default",
    )
    assert cluster.kubectl(*read) == ""
    assert "forbidden" in cluster.kubectl_fails(*read[:-1], "secrets")


@pytest.mark.cluster
def test_helm_installs_and_removes_a_chart(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    cluster.helm("create", tmp_path / "chart")
    cluster.helm("install", "released", tmp_path / "chart", "--namespace", namespace)
    made = cluster.get("deployment", "-n", namespace)["items"]
    assert [deployment["metadata"]["name"] for deployment in made] == ["released-chart"]
    cluster.helm("uninstall", "released", "--namespace", namespace, "--wait")
    assert cluster.get("deployment", "-n", namespace)["items"] == []


@pytest.mark.cluster
def test_a_killed_api_server_refuses_connections_and_comes_back_with_its_data(
    own_cluster: ControlPlane,
) -> None:
    own_cluster.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    own_cluster.kill_api_server()
    assert "refused" in own_cluster.kubectl_fails("get", "configmap", "kept")
    own_cluster.start_api_server()
    assert own_cluster.get("configmap", "kept")["data"] == {"a": "b"}


@pytest.mark.cluster
def test_nothing_of_a_control_plane_outlives_a_launcher_that_is_killed(
    cluster_tools: environment.ClusterTools, tmp_path: Path
) -> None:
    launcher = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tests.cluster_env import control_plane, environment

        tools = environment.ClusterTools(folder=Path({str(cluster_tools.folder)!r}))
        plane = control_plane.ControlPlane(tools, folder=Path({str(tmp_path)!r}))
        plane.start()
        print(*plane.pids(), flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 4
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if runs(pid)]}"
            time.sleep(0.05)


def test_missing_tools_name_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(environment.ClusterToolsError, match=r"python -m tests\.cluster_env build"):
        environment.require()


@pytest.mark.processes
@pytest.mark.parametrize(("required", "outcome"), [("1", "errors"), ("", "skipped")])
def test_without_the_tools_a_test_is_skipped_or_fails_where_it_must_not_be(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    monkeypatch.setenv("PREFIX_GATEWAY_REQUIRE_CLUSTER", required)
    monkeypatch.setenv("PYTHONPATH", os.fspath(REPOSITORY))
    pytester.makepyfile("""
        pytest_plugins = ["tests.cluster_env.fixtures"]

        def test_it(namespace):
            raise AssertionError("it ran")
    """)
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-rs")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*python -m tests.cluster_env build*"])
