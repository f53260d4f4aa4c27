"""The stand-in kubelet treats pods as a kubelet does, as far as our charts and tests rely on it."""

from __future__ import annotations

import asyncio
import base64
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


TELLING = """
    id -u; echo "$WORD $POD on $NODE has $ADDRESS and $POD_AGAIN, $LIMIT cores"; cat /etc/settings/a.yaml; echo
    touch /outside 2>&1; touch /scratch/inside && echo written; hostname; grep CapEff /proc/1/status
    sleep 1000
"""
READING_API = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(folder + "/token").read()})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "/ca.crt"), timeout=30)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


def telling_pod() -> dict[str, Any]:
    """Return a pod. Its `main` prints what it has, and its `api` prints the API server's answer to its
    token.
    """
    security = {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
    refs = {
        "WORD": {"secretKeyRef": {"name": "login", "key": "word"}},
        "NODE": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "ADDRESS": {"fieldRef": {"fieldPath": "status.podIP"}},
        "LIMIT": {"resourceFieldRef": {"resource": "limits.cpu"}},
    }
    env = [
        POD_NAME,
        *({"name": name, "valueFrom": source} for name, source in refs.items()),
        {"name": "POD_AGAIN", "value": "$(POD) $$(POD)"},
    ]
    mounts = [
        {"name": "settings", "mountPath": "/etc/settings"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]
    main = shell("main", TELLING, env=env, securityContext=security, volumeMounts=mounts)
    main["resources"] = {"limits": {"cpu": "1500m"}}
    volumes = [{"name": "settings", "configMap": {"name": "settings"}}, {"name": "scratch", "emptyDir": {}}]
    return pod("told", [main, python("api", READING_API)], volumes=volumes)


def test_a_container_has_its_variables_files_user_and_token(pods: Pods, node: RunningNode) -> None:
    pods.plane.kubectl(
        "create", "secret", "generic", "login", "--from-literal=word=open", "-n", pods.namespace
    )
    pods.plane.kubectl("create", "configmap", "settings", "--from-literal=a.yaml=first", "-n", pods.namespace)
    pods.apply(telling_pod())

    found = pods.wait("told", lambda p: bool(container_status(p, "api").get("lastState")), what="api has run")
    path = f"{pods.namespace}/told"
    eventually(lambda: "CapEff" in node.log(path, "main"), what="the script has run")
    address = found["status"]["podIP"]
    log = node.log(path, "main").splitlines()
    assert log[:5] == [
        "65532",
        f"open told on node-1 has {address} and told $(POD), 2 cores",
        "first",
        "touch: cannot touch '/outside': Read-only file system",
        "written",
    ]
    assert log[5:] == ["told", "CapEff:\t0000000000000000"]
    assert "403" in node.log(path, "api")
    assert f"system:serviceaccount:{pods.namespace}:default" in node.log(path, "api")


def test_a_mounted_config_map_follows_the_object_in_one_step(pods: Pods, node: RunningNode) -> None:
    create = ("create", "configmap", "settings", "-n", pods.namespace, "--dry-run=client", "-o", "yaml")
    literals = [("--from-literal=a=1", "--from-literal=b=1"), ("--from-literal=a=2", "--from-literal=c=2")]
    first, second = (pods.plane.kubectl(*create, *literal) for literal in literals)
    pods.plane.kubectl("apply", "-f", "-", stdin=first)
    script = 'while true; do d=$(readlink -f /s/..data); echo "$(ls $d | tr "\\n" " ")= $(ls /s | tr "\\n" " ")"; sleep 0.1; done'
    main = shell("main", script, volumeMounts=[{"name": "s", "mountPath": "/s"}])
    pods.apply(pod("reader", [main], volumes=[{"name": "s", "configMap": {"name": "settings"}}]))
    pods.wait_ready("reader")
    pods.plane.kubectl("apply", "-f", "-", stdin=second)
    log = f"{pods.namespace}/reader"
    eventually(lambda: "a c = a c" in node.log(log, "main"), what="the container sees the new state")
    assert node.log(log, "main").startswith("a b = a b")


def test_init_containers_run_in_order_and_a_sidecar_outlives_the_main_container(
    pods: Pods, node: RunningNode
) -> None:
    """The containers meet in the emptyDir. The test reads it from the node's folder after the pod has
    ended.
    """
    mount = [{"name": "shared", "mountPath": "/shared"}]
    note = 'note() { echo "$1" >> /shared/notes; }; '
    trapping = note + 'trap "note WHO-ends; exit 0" TERM; note WHO-runs; while true; do sleep 0.1; done'
    sidecar = shell(
        "sidecar",
        trapping.replace("WHO", "sidecar"),
        restartPolicy="Always",
        volumeMounts=mount,
        startupProbe={"exec": {"command": ["grep", "sidecar-runs", "/shared/notes"]}, "periodSeconds": 1},
    )
    init = shell("init", note + "note init-runs", volumeMounts=mount)
    pre_stop = {"preStop": {"exec": {"command": ["sh", "-c", "echo main-pre-stop >> /shared/notes"]}}}
    main = shell("main", trapping.replace("WHO", "main"), volumeMounts=mount, lifecycle=pre_stop)
    pods.apply(
        pod("ordered", [main], initContainers=[init, sidecar], volumes=[{"name": "shared", "emptyDir": {}}])
    )
    pods.wait_ready("ordered")
    uid = pods.get("ordered")["metadata"]["uid"]
    notes = node.folder / "pods" / uid / "volumes" / "shared" / "notes"
    eventually(lambda: "main-runs" in notes.read_text(), what="main runs")
    pods.delete("ordered", "--grace-period=60")
    assert notes.read_text().split() == [
        *("init-runs", "sidecar-runs", "main-runs"),
        *("main-pre-stop", "main-ends", "sidecar-ends"),
    ]
    assert f"{pods.namespace}/ordered" not in node.running()


def test_a_container_that_ignores_sigterm_is_killed_after_its_grace_period(
    pods: Pods, node: RunningNode
) -> None:
    pods.apply(pod("deaf", [{"name": "main", "image": "tools:v1", "args": ["1000"]}]))
    pods.wait_ready("deaf")
    pods.delete("deaf", "--grace-period=1")
    assert f"{pods.namespace}/deaf" not in node.running()


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


def test_pods_reach_a_service_by_its_name(pods: Pods, node: RunningNode) -> None:
    code = f"""
import time, urllib.request
for name in ("web", "web.{pods.namespace}.svc.cluster.local"):
    while True:
        try:
            print(name, urllib.request.urlopen(f"http://{{name}}:8080/", timeout=5).read().decode(), flush=True)
            break
        except OSError:
            time.sleep(0.1)
time.sleep(1000)
"""
    pods.apply(
        web_service(to=80), pod("web", [serving_container("web")]), pod("client", [python("main", code)])
    )
    lines = ["web web", f"web.{pods.namespace}.svc.cluster.local web"]
    log = f"{pods.namespace}/client"
    eventually(lambda: node.log(log, "main").splitlines() == lines, what="the client has its answers")


def test_a_failed_liveness_probe_restarts_the_container_and_a_startup_probe_holds_it_back(
    pods: Pods, node: RunningNode
) -> None:
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


def test_a_container_that_keeps_failing_waits_longer_and_a_killed_one_starts_at_once(
    pods: Pods, node: RunningNode
) -> None:
    pods.apply(pod("failing", [shell("main", "exit 3")]), pod("killed", [shell("main", "exec sleep 1000")]))
    pods.wait_ready("killed")
    before = node.usage(f"{pods.namespace}/killed", "main")
    node.signal(f"{pods.namespace}/killed", "main", signal.SIGKILL)
    found = pods.wait(
        "killed", lambda p: container_status(p, "main")["restartCount"] == 1 and is_ready(p), what="a restart"
    )
    assert container_status(found, "main")["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    assert node.usage(f"{pods.namespace}/killed", "main").pid != before.pid
    waiting = pods.wait(
        "failing",
        lambda p: container_status(p, "main")["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff",
        what="a back-off",
    )
    assert not is_ready(waiting)


def test_a_pod_waits_for_missing_objects_and_its_status_names_them(pods: Pods) -> None:
    missing = {"secretKeyRef": {"name": "later", "key": "word"}}
    wanting = shell("main", "sleep 1000", env=[{"name": "WORD", "valueFrom": missing}])
    unknown = {"name": "main", "image": "tools:v2", "args": ["1000"]}
    pods.apply(pod("wanting", [wanting]), pod("unknown", [unknown]))

    def waits(reason: str) -> Any:
        return lambda p: container_status(p, "main")["state"].get("waiting", {}).get("reason") == reason

    pods.wait("unknown", waits("ErrImagePull"), what="the image is refused")
    pods.wait("wanting", waits("CreateContainerConfigError"), what="the secret is missed")
    word = base64.b64encode(b"here").decode()
    pods.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "later"}, "data": {"word": word}})
    pods.wait_ready("wanting")


def test_a_pod_that_runs_to_its_end_succeeds_or_fails(pods: Pods) -> None:
    once = {"restartPolicy": "Never"}
    pods.apply(pod("good", [shell("main", "exit 0")], **once), pod("bad", [shell("main", "exit 5")], **once))
    pods.wait("good", lambda p: p["status"]["phase"] == "Succeeded", what="good succeeds")
    pods.wait("bad", lambda p: p["status"]["phase"] == "Failed", what="bad fails")


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
