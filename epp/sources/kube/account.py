"""Finds the service account of this process from its own token, so that the objects which the process makes
can belong to the account.

When a chart is uninstalled, the cluster's garbage collector deletes all objects that belong to the account.
This works for the objects of every replica, and after all replicas have ended. The token is read but not
verified, because its content is only sent back to the API server that issued it. Called by `cluster`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

TOKEN_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def owner(token_file: Path, *, namespace: str) -> Mapping[str, str] | None:
    """Return the account as an owner reference for objects of `namespace`.

    None: there is no account of this namespace. Either there is no token, or no current API server issued it,
    or the account is in another namespace. The garbage collector would regard an owner in another namespace
    as deleted.
    """
    try:
        _, payload, _ = token_file.read_text().split(".")
        text = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        claims = json.loads(text)["kubernetes.io"]
        found, account = claims["namespace"], claims["serviceaccount"]
        name, uid = str(account["name"]), str(account["uid"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if found != namespace:
        return None
    return {"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": uid}
