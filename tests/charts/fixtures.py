"""Fixtures over the charts. Helm comes with the cluster's tools."""

import pytest

from tests.charts import addon_crds
from tests.charts.rendering import Helm
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.environment import ClusterTools
from tests.cluster_env.preparing import await_established


@pytest.fixture(scope="session")
def helm(cluster_tools: ClusterTools) -> Helm:
    return Helm(cluster_tools.helm)


@pytest.fixture(scope="session")
def cluster_with_addons(cluster: ControlPlane) -> ControlPlane:
    """Return the shared control plane, with every CRD that a chart can use except our own."""
    crds = addon_crds.fetch(progress=print)
    cluster.kubectl("apply", "--server-side", "-f", crds)
    await_established(cluster, "-f", crds)
    return cluster
