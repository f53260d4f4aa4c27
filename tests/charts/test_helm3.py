"""The charts under helm 3, which many clusters still use. helm 3 renders the same objects as helm 4, and its
upgrades do not touch what others own.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.charts.rendering import GATEWAY, MODEL_SERVER, VALUE_SETS, Helm, ValueSet
from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.images import with_images

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster

BY_NAME = pytest.mark.parametrize("wanted", VALUE_SETS, ids=lambda each: each.name)
MADE_ANEW: Final = re.compile(r"(password: |checksum/password: |tls\.(?:crt|key): ).*")
SCALED: Final = (
    *("engine=simulated", "autoscaling.enabled=true", "autoscaling.metrics[0].type=Resource"),
    *("autoscaling.metrics[0].resource.name=cpu", "autoscaling.metrics[0].resource.target.type=Utilization"),
    "autoscaling.metrics[0].resource.target.averageUtilization=80",
)


@pytest.fixture(scope="session")
def helm3(helm: Helm) -> Helm:
    """Return helm 3. The fixture asks for `helm` first, so the test is skipped if the cluster's tools are
    missing.
    """
    found = Helm(environment.helm3(progress=print))
    assert found.run("version", "--short").startswith("v3.")
    assert helm.run("version", "--short").startswith("v4.")
    return found


@pytest.fixture
def helms(helm: Helm, helm3: Helm) -> dict[int, Helm]:
    """Return both versions of helm by their major version."""
    return {3: helm3, 4: helm}


@BY_NAME
def test_both_helms_make_the_same_objects(helm: Helm, helm3: Helm, wanted: ValueSet) -> None:
    texts = [
        sorted(MADE_ANEW.sub(r"\1", part).strip() for part in text.split("\n---\n"))
        for text in (each.text(wanted.chart, wanted.values, release=wanted.release) for each in (helm, helm3))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("chart", [GATEWAY, MODEL_SERVER], ids=["gateway", "server"])
def test_helm3_lints_them(helm3: Helm, chart: Path) -> None:
    helm3.run("lint", "--strict", chart)


@pytest.mark.parametrize("major", [3, 4])
def test_an_upgrade_leaves_the_count_of_servers_to_their_autoscaler(
    cluster: ControlPlane, namespace: str, helms: dict[int, Helm], tmp_path: Path, major: int
) -> None:
    binary = helms[major].binary

    def run(*words: str | Path) -> None:
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        environment |= {f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [binary, *map(str, with_images(words)), "--namespace", namespace],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr

    run("install", "servers", MODEL_SERVER, "--set", ",".join(SCALED))
    deployment = ("deployment/servers-model-server", "--namespace", namespace)
    cluster.kubectl("scale", "--replicas=3", *deployment)
    run("upgrade", "servers", MODEL_SERVER, "--reset-then-reuse-values", "--set", "longestAnswerSeconds=60")
    assert cluster.get(*deployment)["spec"]["replicas"] == 3
    run("rollback", "servers", "1")
    assert cluster.get(*deployment)["spec"]["replicas"] == 3
    run("uninstall", "servers")
