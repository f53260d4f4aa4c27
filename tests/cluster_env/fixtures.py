"""Fixtures that give a real control plane to tests, which are marked `cluster`.

One control plane starts once a run, some 10 s after the first test asks. All tests share it, and each test
works in a namespace of its own. A test that breaks the control plane, or that needs one without CRDs, takes
`own_cluster`. If the tools or images are not built, the tests are skipped and name the command that builds
them, or fail if PREFIX_GATEWAY_REQUIRE_CLUSTER=1.
"""

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster_env import environment
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.go_programs import EnvoyGateway, GatewaySuite, Keda
from tests.cluster_env.preparing import create_namespace, install_inference_pool
from tests.harness.prepared import CLUSTER, prepared
from tests.image_env import environment as image_env
from tests.image_env.environment import BuiltImage


@pytest.fixture(scope="session")
def cluster_tools() -> environment.ClusterTools:
    return prepared(environment.require, required_by=CLUSTER)


@pytest.fixture(scope="session")
def envoy_gateway() -> EnvoyGateway:
    return prepared(EnvoyGateway.require, required_by=CLUSTER)


@pytest.fixture(scope="session")
def keda() -> Keda:
    return prepared(Keda.require, required_by=CLUSTER)


@pytest.fixture(scope="session")
def gateway_suite() -> GatewaySuite:
    return prepared(GatewaySuite.require, required_by=CLUSTER)


@pytest.fixture(scope="session")
def cluster(
    cluster_tools: environment.ClusterTools, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """Return the control plane that all tests share, with the CRD of InferencePool."""
    with ControlPlane(cluster_tools, folder=tmp_path_factory.mktemp("cluster")) as running:
        install_inference_pool(running)
        yield running


@pytest.fixture
def own_cluster(cluster_tools: environment.ClusterTools, tmp_path: Path) -> Iterator[ControlPlane]:
    """Return a control plane for one test, without CRDs."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ControlPlane(cluster_tools, folder=folder) as running:
        yield running


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    """Return a fresh namespace of the shared control plane, ready for pods."""
    name = f"test-{secrets.token_hex(4)}"
    create_namespace(cluster, name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def built_images() -> Mapping[str, BuiltImage]:
    """Return the images by name: picker, model-server, load."""
    return prepared(image_env.require, required_by=CLUSTER)
