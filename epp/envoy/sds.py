"""Writes small files beside the endpoints file from which Envoy learns where its certificates are (SDS).

Envoy reads certificates that the bootstrap names only once, at its start. After a renewal it would no longer
trust the picker, and every request would bypass the picker unnoticed. If an SDS file names the certificates,
Envoy follows their changes. The SDS files hold only names, no keys. `tls` asks for the paths. The composition
root writes the files before Envoy starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from epp.envoy.replacing import write_if_changed

if TYPE_CHECKING:
    from epp.config.settings import Config
    from epp.config.tls import Tls

GATEWAY_IDENTITY: Final = "gateway-identity"
"""The certificate that the gateway shows its clients."""

CLIENT_TRUST: Final = "client-trust"
"""The CA that signed the certificates of the gateway's clients."""

PICKER_TRUST: Final = "picker-trust"
"""The CA that signed the picker's certificate."""

PICKER_CLIENT: Final = "picker-client"
"""The certificate that Envoy shows the picker."""

_TYPE_URL: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"


def path(config: Config, name: str) -> str:
    """Return the path of the secret's file. The path is absolute, because Envoy may be started from another
    directory.
    """
    return str(PurePath(_absolute(config.envoy.eds_file)).with_suffix(f".{name}.json"))


def write(config: Config) -> None:
    """Write every file that the bootstrap of `config` names. Raises OSError if a file cannot be written."""
    for name, secret in _secrets(config).items():
        resource = {"@type": _TYPE_URL, "name": name, **secret}
        text = json.dumps({"resources": [resource]}, indent=1).encode() + b"\n"
        write_if_changed(Path(path(config, name)), text)


def _secrets(config: Config) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    if clients := config.envoy.tls:
        found[GATEWAY_IDENTITY] = _identity(clients)
        if clients.client_ca_file:
            found[CLIENT_TRUST] = _trust(clients.client_ca_file)
    if picker := config.listen.tls:
        # The picker has the same configuration. Without a CA, its own certificate is trusted.
        found[PICKER_TRUST] = _trust(picker.ca_file or picker.cert_file)
        if picker.client_ca_file:
            found[PICKER_CLIENT] = _identity(picker)
    return found


def _identity(tls: Tls) -> dict[str, object]:
    chain, key = _absolute(tls.cert_file), _absolute(tls.key_file)
    return {
        "tls_certificate": {
            "certificate_chain": {"filename": chain},
            "private_key": {"filename": key},
            "watched_directory": _directory(chain),
        }
    }


def _trust(ca_file: str) -> dict[str, object]:
    ca = _absolute(ca_file)
    return {"validation_context": {"trusted_ca": {"filename": ca}, "watched_directory": _directory(ca)}}


def _directory(file: str) -> dict[str, str]:
    # Envoy watches the directory and not the file: Kubernetes changes a mounted secret by a link beside the
    # file.
    return {"path": str(PurePath(file).parent)}


def _absolute(text: str) -> str:
    return os.path.abspath(text)  # noqa: PTH100 - resolves no links: a mounted secret swaps them
