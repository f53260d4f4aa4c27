"""Pods for the tests of the stand-in kubelet: short manifests, and helpers that follow the pods."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.kubelet.images import python_image

TOOLS: Final = {"tools": python_image("sleep", tags=("v1",))}
"""An image with a shell, Python and the usual commands. Its own command takes the seconds to sleep."""
DEADLINE_S: Final = 120.0
_POLL_S: Final = 0.1


def shell(name: str, script: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs a script."""
    return {"name": name, "image": "tools:v1", "command": ["sh", "-c", script], **fields}


def python(name: str, code: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs Python code."""
    return {"name": name, "image": "tools:v1", "command": ["python", "-c", code], **fields}


def pod(name: str, containers: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    labels = spec.pop("labels", {"app": name})
    metadata = {"name": name, "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [*containers], **spec},
    }


class Pods:
    """The pods of one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    def apply(self, *documents: Mapping[str, Any]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.plane.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=json.dumps(items))

    def get(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = self.plane.get("pod", name, "-n", self.namespace)
        return document

    def delete(self, name: str, *options: str) -> None:
        self.plane.kubectl("delete", "pod", name, "-n", self.namespace, *options)

    def wait_ready(self, *names: str) -> None:
        pods = [f"pod/{name}" for name in names]
        timeout = f"--timeout={DEADLINE_S:.0f}s"
        self.plane.kubectl("wait", "--for=condition=Ready", timeout, "-n", self.namespace, *pods)

    def wait(self, name: str, condition: Callable[[dict[str, Any]], bool], *, what: str) -> dict[str, Any]:
        """Return the pod once the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(found := self.get(name)):
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}\n{found['status']}"
            time.sleep(_POLL_S)
        return found


def is_ready(document: Mapping[str, Any]) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in document["status"].get("conditions", [])
    )


def container_status(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    status = document["status"]
    entries = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((entry for entry in entries if entry["name"] == name), {"state": {}, "restartCount": 0})


def eventually(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(_POLL_S)
