"""Writes the files that Envoy follows: the endpoints (EDS), and where its certificates are (SDS).

A reader sees the old text or the new one, never a part. `epp envoy-config` and the picker write the files
first, since Envoy does not start without them, and the picker writes the endpoints at each change. The
endpoints file does not contain their health: Envoy must know every endpoint that may still be picked, and
only the picker judges health.

Envoy reads certificates that the bootstrap names only once, at its start. After a renewal it would no longer
trust the picker, and every request would bypass the picker unnoticed. If a file names the certificates, Envoy
follows their changes. These files hold only names, no keys. `bootstrap` asks for the references.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, Final

import msgspec
import xxhash

from epp.base.types import Endpoint
from epp.config.sections import Tls
from epp.config.settings import Config

Message = dict[str, Any]
"""A message of Envoy, with the names of the fields as in Envoy's own documentation."""

MODEL_SERVERS: Final = "model-servers"
"""Cluster of the model servers, as in `bootstrap.yaml`."""


def typed(kind: str, **fields: Any) -> Message:
    """Return a message that names its type."""
    return {"@type": f"type.googleapis.com/{kind}", **fields}


def write_if_changed(path: Path, text: bytes) -> None:
    """Make the file contain `text`, also if another program has changed it. Raises OSError."""
    try:
        if path.read_bytes() == text:
            return
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    # The new file is in the same directory, because a rename across file systems copies, and Envoy could read
    # a half copy.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # Envoy may run as another user
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_endpoints(path: Path, endpoints: Iterable[Endpoint]) -> None:
    """Make the file contain `endpoints`. Raises OSError. Only one process may write the file."""
    write_if_changed(path, render_endpoints(endpoints))


def render_endpoints(endpoints: Iterable[Endpoint]) -> bytes:
    """Return a discovery response in JSON, with each address once. Equal endpoints give equal bytes. It has
    only endpoints that may be destinations.
    """
    answering = {endpoint.destination for endpoint in endpoints if endpoint.role.answers}
    hosts = sorted((a.host, a.port) for a in answering)
    addresses = [{"socket_address": {"address": host, "port_value": port}} for host, port in hosts]
    resource = typed(
        "envoy.config.endpoint.v3.ClusterLoadAssignment",
        cluster_name=MODEL_SERVERS,
        endpoints=[{"lb_endpoints": [{"endpoint": {"address": each}} for each in addresses]}],
    )
    # `json` would hold the event loop for 15 ms of every change among 1,000 endpoints.
    version = xxhash.xxh3_64_hexdigest(msgspec.json.encode(resource))
    text = msgspec.json.encode({"version_info": version, "resources": [resource]})
    return msgspec.json.format(text, indent=1) + b"\n"


def secret_path(config: Config, name: str) -> str:
    """Return the path of the file that names a certificate."""
    return str(PurePath(config.envoy.eds_file).with_suffix(f".{name}.json"))


def secret_references(config: Config) -> dict[str, Message | None]:
    """Return how the bootstrap names each certificate. None: the configuration has no such certificate."""
    return {
        name: {"name": name, "sds_config": {"path_config_source": {"path": secret_path(config, name)}}}
        if secret
        else None
        for name, secret in _secrets(config).items()
    }


def write_first(config: Config) -> None:
    """Write the files that the bootstrap names. An endpoints file that exists stays. Raises OSError."""
    for name, secret in _secrets(config).items():
        if secret:
            resource = typed("envoy.extensions.transport_sockets.tls.v3.Secret", name=name, **secret)
            text = json.dumps({"resources": [resource]}, indent=1)
            write_if_changed(Path(secret_path(config, name)), text.encode() + b"\n")
    if not (endpoints := Path(config.envoy.eds_file)).exists():
        write_endpoints(endpoints, ())


def directory_of(path: str) -> Message:
    """Return the directory of an absolute path. Envoy watches a directory and not a file, because both a
    rename and the links of a secret in Kubernetes replace a whole file, and only the directory shows this.
    """
    return {"path": str(PurePath(path).parent)}


def _secrets(config: Config) -> dict[str, Message | None]:
    """Return what the file of each certificate says, by the name that the template asks for."""
    clients, picker = config.envoy.tls, config.listen.tls
    return {
        # What the gateway shows its clients, and the CA that signed their certificates.
        "gateway-identity": _identity(clients) if clients else None,
        "client-trust": _trust(clients.client_ca_file) if clients and clients.client_ca_file else None,
        # The CA of the picker's certificate, or else that certificate, and what Envoy shows the picker.
        "picker-trust": _trust(picker.ca_file or picker.cert_file) if picker else None,
        "picker-client": _identity(picker) if picker and picker.client_ca_file else None,
    }


def _identity(tls: Tls) -> Message:
    return {
        "tls_certificate": {
            "certificate_chain": {"filename": tls.cert_file},
            "private_key": {"filename": tls.key_file},
            "watched_directory": directory_of(tls.cert_file),
        }
    }


def _trust(ca_file: str) -> Message:
    folder = directory_of(ca_file)
    return {"validation_context": {"trusted_ca": {"filename": ca_file}, "watched_directory": folder}}
