"""The steps that prepare a fresh control plane for tests. The fixtures and the tests with their own control
plane call them.
"""

import time
from pathlib import Path

from tests.cluster_env.control_plane import CommandFailedError, ControlPlane


def install_inference_pool(plane: ControlPlane) -> None:
    """Apply the CRD of InferencePool and wait until it is served."""
    plane.kubectl("apply", "--server-side", "-f", plane.tools.crds)
    await_established(plane, "-f", plane.tools.crds)


def create_namespace(plane: ControlPlane, name: str) -> None:
    """Create a namespace. Return once its default service account exists, because no pod is admitted without
    it.
    """
    plane.kubectl("create", "namespace", name)
    await_success(plane, "get", "serviceaccount", "default", "--namespace", name)


def await_established(plane: ControlPlane, *which: str | Path) -> None:
    """Wait until CRDs are served. kubectl does not wait for one that has no conditions yet: it fails."""
    await_success(plane, "wait", "--for=condition=Established", "--timeout=60s", *which)


def await_success(plane: ControlPlane, *words: str | Path) -> None:
    """Run kubectl until it succeeds, for at most a minute."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            plane.kubectl(*words)
        except CommandFailedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
