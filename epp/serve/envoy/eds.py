"""Writes the file through which Envoy learns the endpoints (EDS).

A reader sees the old text or the new one, never a part, since each change is a new file renamed into place.
Equal endpoints give equal bytes in any order. An unchanged set is not written again. The file does not
contain the health of endpoints: Envoy must know every endpoint that may still be picked, and only the picker
judges health. The composition root calls this module before Envoy starts, since Envoy does not start without
the file, and at each change of the endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from epp.base.types import Endpoint
from epp.serve.envoy.replacing import write_if_changed

MODEL_SERVERS: Final = "model-servers"
"""Cluster of the model servers, as in `bootstrap.yaml`."""

_ASSIGNMENT: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def write(path: Path, endpoints: Iterable[Endpoint]) -> bool:
    """Make the file contain `endpoints`. Return False if it already did. Raise OSError if it cannot be
    written. Only one process may write the file.
    """
    return write_if_changed(path, render(endpoints))


def render(endpoints: Iterable[Endpoint]) -> bytes:
    """Return the text of the file: a discovery response in JSON, with each address once, in order. The file
    has only endpoints that may be destinations.
    """
    answering = {endpoint.destination for endpoint in endpoints if endpoint.role.answers}
    hosts = sorted((a.host, a.port) for a in answering)
    addresses = [{"socket_address": {"address": host, "port_value": port}} for host, port in hosts]
    resource = {
        "@type": _ASSIGNMENT,
        "cluster_name": MODEL_SERVERS,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": each}} for each in addresses]}],
    }
    version = xxhash.xxh3_64_hexdigest(json.dumps(resource, sort_keys=True).encode())
    return json.dumps({"version_info": version, "resources": [resource]}, indent=1).encode() + b"\n"
