"""Makes the pieces that many messages of the bootstrap have. A message is a dictionary, with the names of the
fields as in Envoy's own documentation.

Nothing here checks names or types. The tests parse every kind of bootstrap strictly, by Envoy's protobuf
definitions, and start the real Envoy with it.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from epp.base.types import Address

Message = dict[str, Any]


def typed(kind: str, **fields: Any) -> Message:
    """Return a message in a field that takes any type. `kind` is the type without `envoy.` before it."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}


def extension(name: str, kind: str, **fields: Any) -> Message:
    """Return a named extension and its settings."""
    return {"name": f"envoy.{name}", "typed_config": typed(kind, **fields)}


def seconds(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".") + "s"


def address(text: str) -> Message:
    """Return an address from `ip:port` or `unix:/path`."""
    if text.startswith("unix:"):
        return {"pipe": {"path": text.removeprefix("unix:")}}
    parsed = Address.parse(text)
    return socket_address(parsed.host, parsed.port)


def socket_address(host: str, port: int) -> Message:
    return {"socket_address": {"address": host, "port_value": port}}


def absolute(path: str) -> str:
    """Return the path from the root, because Envoy may be started from another directory than the picker."""
    return os.path.abspath(path)  # noqa: PTH100 - resolves no links: a mounted file may be one


def directory_of(path: str) -> Message:
    """Return the directory of an absolute path. Envoy watches a directory and not a file, because both a
    rename and the links of a secret in Kubernetes replace a whole file, and only the directory shows this.
    """
    return {"path": str(PurePath(path).parent)}


def grpc_to(cluster: str) -> Message:
    return {"envoy_grpc": {"cluster_name": cluster}}
