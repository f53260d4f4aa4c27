"""A kubeconfig of one user of one API server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_kubeconfig(folder: Path, *, server: str, user: Mapping[str, Any]) -> Path:
    path = folder / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
    }
    path.write_text(json.dumps(document))
    return path
