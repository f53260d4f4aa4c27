"""The built images for tests, as `pytest_plugins = ["tests.image_env.fixtures"]` brings them;
such tests are marked `cluster`.

Where they are not built the tests are skipped with the command that builds them,
or fail if PREFIX_GATEWAY_REQUIRE_CLUSTER=1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.harness.prepared import prepared
from tests.image_env import environment
from tests.image_env.environment import BuiltImage


@pytest.fixture(scope="session")
def built_images() -> Mapping[str, BuiltImage]:
    """By name: picker, model-server, load."""
    return prepared(environment.require, required_by="PREFIX_GATEWAY_REQUIRE_CLUSTER")
