"""No change of values and no rollback takes a fleet to one pod, under helm 3 and 4, on a real API server.
Each chart meets each helm in one of the two directions.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.charts.rendering import GATEWAY, MODEL_SERVER
from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.images import with_images
from tests.harness.processes import wait_until

pytestmark = pytest.mark.cluster

METRIC: Final = (
    *("autoscaling.metrics[0].type=Resource", "autoscaling.metrics[0].resource.name=cpu"),
    "autoscaling.metrics[0].resource.target.type=Utilization",
    "autoscaling.metrics[0].resource.target.averageUtilization=80",
)
CHARTS: Final = {
    "gateway": (GATEWAY, "gateway-prefix-gateway", ("sharing.enabled=false",)),
    "servers": (MODEL_SERVER, "servers-model-server", ("engine=simulated", *METRIC)),
}
LEAST: Final = 3


@dataclass(frozen=True, slots=True)
class Release:
    """One release of a chart, and the number of replicas that its Deployment asks for."""

    name: str
    major: int
    plane: ControlPlane
    namespace: str
    home: Path

    def helm(self, *words: str | Path) -> str:
        binary = environment.helm3(progress=print) if self.major == 3 else self.plane.tools.helm
        settings = {**os.environ, "KUBECONFIG": str(self.plane.kubeconfig)}
        settings |= {f"HELM_{each}_HOME": str(self.home / each) for each in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [binary, *map(str, with_images(words)), "--namespace", self.namespace],
            check=False,
            capture_output=True,
            text=True,
            env=settings,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *values: str) -> str:
        chart, _, always = CHARTS[self.name]
        return self.helm("upgrade", "--install", self.name, chart, "--set", ",".join((*always, *values)))

    def autoscaled(self, *more: str) -> str:
        scale = (f"autoscaling.minReplicas={LEAST}", "autoscaling.maxReplicas=9", *more)
        return self.apply("autoscaling.enabled=true", *scale)

    def rollback(self, revision: int, *, over_another_owner: bool = False) -> None:
        """over_another_owner: an autoscaler has set another number since, which stops helm 4."""
        force = ("--force-conflicts",) if over_another_owner and self.major == 4 else ()
        self.helm("rollback", self.name, str(revision), *force)

    def scale(self, count: int) -> None:
        """Set the number as an autoscaler does."""
        self.plane.kubectl("scale", f"--replicas={count}", *self._deployment())

    def count(self) -> int:
        return int(self.plane.get(*self._deployment())["spec"]["replicas"])

    async def becomes(self, count: int) -> None:
        await wait_until(lambda: self.count() == count, what=f"{count} replicas", timeout_s=120)

    def _deployment(self) -> tuple[str, ...]:
        return f"deployment/{CHARTS[self.name][1]}", "--namespace", self.namespace


@pytest.fixture
def release(cluster: ControlPlane, namespace: str, tmp_path: Path) -> Callable[[str, int], Release]:
    return lambda name, helm: Release(name, helm, cluster, namespace, tmp_path)


@pytest.mark.parametrize(("helm", "chart"), [(3, "gateway"), (4, "servers")])
async def test_a_fixed_number_goes_over_to_an_autoscaler_and_back(
    release: Callable[[str, int], Release], chart: str, helm: int
) -> None:
    fleet = release(chart, helm)
    fleet.apply("replicas=5")
    fleet.autoscaled()
    assert fleet.count() == 5
    fleet.scale(7)
    fleet.autoscaled("longestAnswerSeconds=60")
    assert fleet.count() == 7
    fleet.rollback(2, over_another_owner=True)
    assert fleet.count() >= 5
    fleet.rollback(1)
    assert fleet.count() == 5
    fleet.autoscaled()
    fleet.scale(6)
    fleet.apply("replicas=4")
    assert fleet.count() == 6, "no pod ends at the handover"
    fleet.apply("replicas=4")
    await fleet.becomes(4)
    fleet.apply("replicas=null")
    assert fleet.count() == 4


@pytest.mark.parametrize(("helm", "chart"), [(3, "servers"), (4, "gateway")])
async def test_an_autoscaled_fleet_gets_a_fixed_number_and_is_rolled_back(
    release: Callable[[str, int], Release], chart: str, helm: int
) -> None:
    fleet = release(chart, helm)
    fleet.autoscaled()
    await fleet.becomes(LEAST)
    fleet.scale(6)
    output = fleet.apply("replicas=4")
    assert chart == "servers" or "6 pods stay, and the next upgrade sets 4" in output
    assert fleet.count() == 6, "no pod ends at the handover"
    fleet.apply("replicas=4")
    await fleet.becomes(4)
    fleet.rollback(1)
    assert fleet.count() == 4
    fleet.scale(8)
    fleet.autoscaled("longestAnswerSeconds=60")
    fleet.rollback(1)
    assert fleet.count() == 8


@pytest.mark.parametrize("helm", [3, 4])
def test_servers_of_an_older_chart_go_over_to_an_autoscaler(
    release: Callable[[str, int], Release], cluster: ControlPlane, namespace: str, helm: int
) -> None:
    fleet = release("servers", helm)
    fleet.apply("replicas=5")
    unmark = ("annotate", "deployment/servers-model-server", "prefix-gateway.dev/replicas-")
    cluster.kubectl(*unmark, "--namespace", namespace)
    assert "WARNING: the cluster has no metrics.k8s.io" in fleet.autoscaled(), "and no pod ends"
    assert fleet.count() == 5
