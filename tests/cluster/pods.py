"""What the status of a pod says."""

from collections.abc import Mapping
from typing import Any


def ready_since(document: Mapping[str, Any]) -> str:
    """Return when the pod became Ready. Fail if it is not."""
    (condition,) = [c for c in document["status"]["conditions"] if c["type"] == "Ready"]
    assert condition["status"] == "True", condition
    return str(condition["lastTransitionTime"])


def container_status(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    status = document["status"]
    entries = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((entry for entry in entries if entry["name"] == name), {"state": {}, "restartCount": 0})
