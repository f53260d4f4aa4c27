"""Starts, breaks and stops one real control plane: etcd, API server, controller manager, scheduler.

Everything listens on free ports of 127.0.0.1. No process outlives the process that started it. Authorization
and admission are those of a real cluster (Node and RBAC, service-account tokens, the default admission
plug-ins and NodeRestriction). Users are bearer tokens. There is no kubelet: pods stay where the scheduler put
them until `tests.harness.kubelet` or a test reports on them. The fixtures and the command line call this
module.
"""

import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.demo.tether import tethered
from tests.cluster_env.environment import ClusterTools, require
from tests.cluster_env.images import with_images
from tests.harness.cached_builds import say
from tests.harness.certificate import write_tls
from tests.harness.ports import free_ports

SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE_IP: Final = "10.96.0.1"
START_TIMEOUT_S: Final = 180.0

_HOST: Final = "127.0.0.1"
# Signs service-account tokens. The key guards nothing. It is here so that tests need no program that makes
# keys.
_SIGNING_KEY: Final = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIHC2qfMWYrCn4ZW0nX29tqupnBFzeWQx0Fq+SyflW0LeoAoGCCqGSM49
AwEHoUQDQgAEZVkKVI9VsOwfuaHTq/6vI5SY8fFg1619ifxv7TR2hEOv6Wx9aCrh
xqunJUFD6JjOXMuiVcN1ZUtQ9+jTT+NIoA==
-----END EC PRIVATE KEY-----
"""
_POLL_S: Final = 0.1
_ATTEMPTS: Final = 3
_IN_USE: Final = "address already in use"
_LEADERS: Final = {"kube-controller-manager": "manager", "kube-scheduler": "scheduler"}
"""The names of the processes that elect leaders, and the names of their users."""
_MASTERS: Final = "system:masters"


class ControlPlaneError(Exception):
    """The control plane did not start, or died. The message ends with the tail of the log."""


class CommandFailedError(AssertionError):
    """kubectl or helm did not end as the test expects. The message holds their output."""


class ControlPlane:
    """One control plane. The object is cheap to make. `start` takes some 10 s, and `stop` drops all data."""

    def __init__(self, tools: ClusterTools, *, folder: Path) -> None:
        """`folder` receives data, logs and kubeconfigs."""
        self.tools = tools
        self.folder = folder
        self.kubeconfig = folder / "admin.kubeconfig"
        self.url = ""
        self.ready_after_s = 0.0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tokens: dict[str, str] = {}
        self._ports: list[int] = []
        self._port_held: socket.socket | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def ca_file(self) -> Path:
        """The file with which clients verify the API server.
        The API server writes it, with a fresh key, at its first start.
        """
        return self.folder / "pki" / "apiserver.crt"

    def start(self) -> None:
        """Start everything. Return once the scheduler and every controller can work.
        Raise ControlPlaneError if the control plane cannot be started.
        """
        started_at = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                self._start_all()
            except ControlPlaneError as error:
                self.stop()
                # Between the choice of a port and its use, another process may take it.
                if _IN_USE not in str(error) or attempt + 1 == _ATTEMPTS:
                    raise
            else:
                break
        self.ready_after_s = time.monotonic() - started_at

    def stop(self) -> None:
        """Kill everything. The folder stays, for its logs."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        if self._port_held is not None:
            self._port_held.close()
            self._port_held = None

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def kill_api_server(self) -> None:
        """Kill the API server as a crash would. Its port refuses connections until `start_api_server`.
        Controller manager and scheduler end with it: in a real cluster they lose their leases within seconds,
        end, and are started again.
        """
        for name in ("kube-apiserver", *_LEADERS):
            process = self._processes.pop(name)
            process.kill()
            process.wait()
        self._port_held = socket.socket()
        self._port_held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_held.bind((_HOST, self._ports[2]))

    def start_api_server(self) -> None:
        """Start the API server again on the same port, with the same data. Return once it is ready."""
        if self._port_held is not None:
            self._port_held.close()
            self._port_held = None
        etcd, _, api = self._ports
        self._spawn("kube-apiserver", [self.tools.kube, "kube-apiserver", *self._api_flags(etcd, api)])
        self._wait(lambda: self._answers("/readyz"), what="the API server is ready")
        for name, user in _LEADERS.items():
            kubeconfig = self._write_kubeconfig(user, self._tokens[user])
            flags = self._manager_flags() if user == "manager" else []
            flags += ["--kubeconfig", str(kubeconfig), "--secure-port", "0", "--leader-elect=false"]
            self._spawn(name, [self.tools.kube, name, *flags])

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Return what kubectl prints, as the administrator. Raise CommandFailedError if kubectl fails."""
        return self._command([self.tools.kubectl, *arguments], stdin=stdin, fails=False)

    def kubectl_fails(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Return kubectl's message when it fails. Raise CommandFailedError if kubectl succeeds."""
        return self._command([self.tools.kubectl, *arguments], stdin=stdin, fails=True)

    def helm(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self._command([self.tools.helm, *with_images(arguments)], stdin=stdin, fails=False)

    def helm_fails(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self._command([self.tools.helm, *with_images(arguments)], stdin=stdin, fails=True)

    def get(self, *arguments: str) -> Any:
        """Return the parsed output of `kubectl get ... -o json`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def kubeconfig_for(self, service_account: str, *, namespace: str) -> Path:
        """Return a kubeconfig with a token of this service account, as a pod of the account would have."""
        token = self.kubectl("create", "token", service_account, "--namespace", namespace).strip()
        return self._write_kubeconfig(f"{namespace}-{service_account}", token, namespace=namespace)

    def kubeconfig_for_node(self, node: str) -> Path:
        """Return a kubeconfig with the rights of the kubelet of this node."""
        return self._acting_as(node, f"system:node:{node}", groups=("system:nodes",))

    def kubeconfig_for_proxy(self) -> Path:
        """Return a kubeconfig with the rights of kube-proxy."""
        return self._acting_as("proxy", "system:kube-proxy", groups=())

    def kubeconfig_inside(self) -> Path:
        """Return a kubeconfig of the administrator for programs in the network of a node."""
        document = json.loads(self.kubeconfig.read_text())
        document["clusters"][0]["cluster"]["server"] = f"https://{API_SERVICE_IP}:443"
        path = self.folder / "inside.kubeconfig"
        path.write_text(json.dumps(document))
        return path

    def log_tail(self, name: str, *, lines: int = 30) -> str:
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"--- the last lines of {path}:", *text[-lines:]])

    def _start_all(self) -> None:
        self._ports = free_ports(3)
        etcd, peer, api = self._ports
        self.url = f"https://{_HOST}:{api}"
        self._write_secrets()
        self._spawn("etcd", [self.tools.etcd, *self._etcd_flags(etcd, peer)])
        self.start_api_server()
        self._write_kubeconfig("admin", self._tokens["admin"], namespace="default")
        self._wait(
            lambda: self._answers("/api/v1/namespaces/default/serviceaccounts/default"),
            what="the controller manager works",
        )

    def _etcd_flags(self, client: int, peer: int) -> list[str]:
        urls = {"client": f"http://{_HOST}:{client}", "peer": f"http://{_HOST}:{peer}"}
        return [
            *("--name", "test", "--data-dir", str(self.folder / "etcd")),
            *("--log-level", "warn", "--unsafe-no-fsync"),
            *("--listen-client-urls", urls["client"], "--advertise-client-urls", urls["client"]),
            *("--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", urls["peer"]),
            *("--initial-cluster", f"test={urls['peer']}"),
        ]

    def _api_flags(self, etcd: int, port: int) -> list[str]:
        pki = self.folder / "pki"
        return [
            *("--etcd-servers", f"http://{_HOST}:{etcd}", "--cert-dir", str(pki)),
            *("--bind-address", _HOST, "--advertise-address", _HOST, "--secure-port", str(port)),
            "--endpoint-reconciler-type=none",  # a reconciler would refuse a loopback address
            *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction"),
            *("--token-auth-file", str(pki / "tokens.csv"), "--allow-privileged"),
            *("--service-account-issuer", "https://kubernetes.default.svc.cluster.local"),
            *("--service-account-key-file", str(pki / "accounts.key")),
            *("--service-account-signing-key-file", str(pki / "accounts.key")),
            *("--service-cluster-ip-range", SERVICE_NETWORK),
            # API servers of others, such as KEDA's metrics adapter, trust the users that this one names.
            *("--proxy-client-cert-file", str(pki / "tls.crt")),
            *("--proxy-client-key-file", str(pki / "tls.key")),
            *("--requestheader-client-ca-file", str(pki / "tls.crt")),
            *("--requestheader-username-headers", "X-Remote-User"),
            *("--requestheader-group-headers", "X-Remote-Group"),
            *("--requestheader-extra-headers-prefix", "X-Remote-Extra-"),
        ]

    def _manager_flags(self) -> list[str]:
        return [
            *("--use-service-account-credentials", "--root-ca-file", str(self.ca_file)),
            "--horizontal-pod-autoscaler-sync-period=2s",  # 15 s by default, and tests wait for it
            *("--service-account-private-key-file", str(self.folder / "pki" / "accounts.key")),
        ]

    def _write_secrets(self) -> None:
        pki = self.folder / "pki"
        pki.mkdir(parents=True, exist_ok=True)
        (pki / "accounts.key").write_text(_SIGNING_KEY)
        write_tls(pki)
        users = {
            "admin": ("admin", _MASTERS),
            "manager": ("system:kube-controller-manager", ""),
            "scheduler": ("system:kube-scheduler", ""),
        }
        self._tokens = {name: secrets.token_hex(16) for name in users}
        rows = [f'{self._tokens[name]},{user},{user},"{groups}"\n' for name, (user, groups) in users.items()]
        (pki / "tokens.csv").write_text("".join(rows))

    def _acting_as(self, name: str, user: str, *, groups: Sequence[str]) -> Path:
        acting = {"as": user, "as-groups": [*groups, "system:authenticated"]}
        return self._write_kubeconfig(name, self._tokens["admin"], acting=acting)

    def _write_kubeconfig(
        self, name: str, token: str, *, namespace: str = "", acting: Mapping[str, object] | None = None
    ) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token, **(acting or {})}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path

    def _spawn(self, name: str, command: Sequence[str | Path]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                tethered([str(part) for part in command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, condition: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ControlPlaneError(f"{name} ended with {process.returncode}\n{self.log_tail(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(self.log_tail(name) for name in self._processes)
                raise ControlPlaneError(f"not within {START_TIMEOUT_S:.0f} s: {what}\n{logs}")
            time.sleep(_POLL_S)

    def _answers(self, path: str) -> bool:
        """Tell whether the API server answers a GET with 200."""
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self._tokens['admin']}"}
        )
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            with urllib.request.urlopen(request, context=context, timeout=5):
                return True
        except (OSError, urllib.error.URLError, ssl.SSLError):
            return False

    def _command(self, command: Sequence[str | Path], *, stdin: str | None, fails: bool) -> str:
        home = {
            name: str(self.folder / "helm" / name)
            for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        }
        environment = {
            **os.environ,
            **home,
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.folder / "kubectl-cache"),
        }
        finished = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        if (finished.returncode != 0) != fails:
            output = f"{finished.stdout}{finished.stderr}"
            raise CommandFailedError(
                f"{' '.join(map(str, command))} ended with {finished.returncode}\n{output}"
            )
        return finished.stderr if fails else finished.stdout


def keep_up() -> None:
    """Run a control plane until a person ends it."""
    with tempfile.TemporaryDirectory() as folder, ControlPlane(require(), folder=Path(folder)) as plane:
        say(f"up in {plane.ready_after_s:.1f} s")
        say(f"export KUBECONFIG={plane.kubeconfig} PATH={plane.tools.kubectl.parent}:$PATH")
        say("Enter or ctrl-C ends it")
        sys.stdin.readline()
