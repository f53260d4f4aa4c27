"""What the status of a pod says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_ready(document: Mapping[str, Any]) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in document["status"].get("conditions", [])
    )


def container_status(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    status = document["status"]
    entries = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((entry for entry in entries if entry["name"] == name), {"state": {}, "restartCount": 0})
