"""Writes the file through which Envoy learns the endpoints (EDS), and keeps it equal to the picker's
endpoints.

A reader sees the old text or the new one, never a part, since each change is a new file renamed into place.
Equal endpoints give equal bytes in any order. An unchanged set is not written again. The file does not
contain the health of endpoints: Envoy must know every endpoint that may still be picked, and only the picker
judges health. The composition root calls this module before Envoy starts, since Envoy does not start without
the file, and at each change of the endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import xxhash

from epp.envoy.names import MODEL_SERVERS
from epp.envoy.replacing import write_if_changed
from epp.types import Address, Endpoint

_ASSIGNMENT: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


class EdsFile:
    """One endpoints file. Only one process may write it. If several processes write it, the last one wins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, endpoints: Iterable[Endpoint]) -> bool:
        """Make the file contain `endpoints`. Return False if it already did. Raise OSError if it cannot be
        written.
        """
        return write_if_changed(self._path, render(endpoints))

    def check_integrity(self) -> None:
        """Check that the file has content that `render` could have written, and that no temporary file is
        left.
        """
        document = json.loads(self._path.read_bytes())
        (resource,) = document["resources"]
        assert document["version_info"] == _version(resource), "the version is not of this content"
        leftovers = list(self._path.parent.glob(f".{self._path.name}.*"))
        assert not leftovers, f"left behind: {leftovers}"


def render(endpoints: Iterable[Endpoint]) -> bytes:
    """Return the text of the file: a discovery response in JSON, with each address once, in order. The file
    has only endpoints that may be destinations.
    """
    answering = {endpoint.destination for endpoint in endpoints if endpoint.role.answers}
    addresses = sorted(answering, key=lambda a: (a.host, a.port))
    resource = {
        "@type": _ASSIGNMENT,
        "cluster_name": MODEL_SERVERS,
        "endpoints": [{"lb_endpoints": [_lb_endpoint(address) for address in addresses]}],
    }
    document = {"version_info": _version(resource), "resources": [resource]}
    return json.dumps(document, indent=1).encode() + b"\n"


def _lb_endpoint(address: Address) -> dict[str, object]:
    socket_address = {"address": address.host, "port_value": address.port}
    return {"endpoint": {"address": {"socket_address": socket_address}}}


def _version(resource: Mapping[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(resource, sort_keys=True).encode())
