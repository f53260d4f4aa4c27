"""The fixture of the built images. Tests that use it are marked `cluster`. If the images are not built, these
tests are skipped and name the command that builds them, or fail if PREFIX_GATEWAY_REQUIRE_CLUSTER=1.
"""

from collections.abc import Mapping

import pytest

from tests.harness.prepared import CLUSTER, prepared
from tests.image_env import environment
from tests.image_env.environment import BuiltImage


@pytest.fixture(scope="session")
def built_images() -> Mapping[str, BuiltImage]:
    """Return the images by name: picker, model-server, load."""
    return prepared(environment.require, required_by=CLUSTER)
