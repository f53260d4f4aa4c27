"""The file through which Envoy learns the endpoints (EDS), kept equal to what the picker holds.

Invariants: a reader sees the old text or the new one, never a part, since each change is a new file renamed into
place; equal endpoints give equal bytes in any order; an unchanged set is not written again. The health of an endpoint
is not told: Envoy must hold every one that may still be picked, and only the picker judges. Called by the composition
root before Envoy starts, since Envoy does not start without the file, and at each change of the endpoints.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import xxhash

from epp.envoy.names import MODEL_SERVERS
from epp.types import Address, Endpoint

_ASSIGNMENT: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


class EdsFile:
    """One endpoints file. Only one process may write it; the last one wins where several do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, endpoints: Iterable[Endpoint]) -> bool:
        """Make the file say `endpoints`; False when it already did. OSError when it cannot be written.

        What counts is the file as it is, not what was last written: another hand's change is put right.
        """
        text = render(endpoints)
        try:
            if self._path.read_bytes() == text:
                return False
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._replace(text)
        return True

    def check_integrity(self) -> None:
        """The file holds what `render` could have written, and no leftover lies beside it."""
        document = json.loads(self._path.read_bytes())
        (resource,) = document["resources"]
        assert document["version_info"] == _version(resource), "the version is not of this content"
        leftovers = list(self._path.parent.glob(f".{self._path.name}.*"))
        assert not leftovers, f"left behind: {leftovers}"

    def _replace(self, text: bytes) -> None:
        # In the same directory: a rename across file systems would be a copy, which Envoy could read half.
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # Envoy may run as another user
                file.write(text)
            Path(temporary).replace(self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def render(endpoints: Iterable[Endpoint]) -> bytes:
    """The file's text: a discovery response in JSON, addresses sorted and each once."""
    addresses = sorted({endpoint.address for endpoint in endpoints}, key=lambda a: (a.host, a.port))
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
