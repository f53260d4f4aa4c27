"""Writes small files beside the endpoints file from which Envoy learns where its certificates are (SDS).

Envoy reads certificates that the bootstrap names only once, at its start. After a renewal it would no longer
trust the picker, and every request would bypass the picker unnoticed. If an SDS file names the certificates,
Envoy follows their changes. The SDS files hold only names, no keys. `bootstrap` asks for the references. The
composition root writes the files before Envoy starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePath
from typing import Any, Final

from epp.config.settings import Config
from epp.config.tls import Tls
from epp.serve.envoy.replacing import write_if_changed

Message = dict[str, Any]
"""A message of Envoy, with the names of the fields as in Envoy's own documentation."""

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
    """Return the path of the secret's file."""
    return str(PurePath(absolute(config.envoy.eds_file)).with_suffix(f".{name}.json"))


def references(config: Config) -> dict[str, Message]:
    """Return how the bootstrap names each secret of `config`, by its name."""
    return {
        name: {"name": name, "sds_config": {"path_config_source": {"path": path(config, name)}}}
        for name in _secrets(config)
    }


def write(config: Config) -> None:
    """Write every file that the bootstrap of `config` names. Raises OSError if a file cannot be written."""
    for name, secret in _secrets(config).items():
        resource = {"@type": _TYPE_URL, "name": name, **secret}
        text = json.dumps({"resources": [resource]}, indent=1).encode() + b"\n"
        write_if_changed(Path(path(config, name)), text)


def absolute(path: str) -> str:
    """Return the path from the root, because Envoy may be started from another directory than the picker."""
    return os.path.abspath(path)  # noqa: PTH100 - resolves no links: a mounted file may be one


def directory_of(path: str) -> Message:
    """Return the directory of an absolute path. Envoy watches a directory and not a file, because both a
    rename and the links of a secret in Kubernetes replace a whole file, and only the directory shows this.
    """
    return {"path": str(PurePath(path).parent)}


def _secrets(config: Config) -> dict[str, Message]:
    found: dict[str, Message] = {}
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


def _identity(tls: Tls) -> Message:
    chain, key = absolute(tls.cert_file), absolute(tls.key_file)
    return {
        "tls_certificate": {
            "certificate_chain": {"filename": chain},
            "private_key": {"filename": key},
            "watched_directory": directory_of(chain),
        }
    }


def _trust(ca_file: str) -> Message:
    ca = absolute(ca_file)
    return {"validation_context": {"trusted_ca": {"filename": ca}, "watched_directory": directory_of(ca)}}
