"""What a configuration needs of the machine it is checked on: certificates that fit, folders that can be written.

Nothing is left behind. Called by `epp check` alone: `epp serve` says the same of its own files by failing, and Envoy's
certificates may lie where only Envoy sees them, so that their absence is a remark and not an error.
"""

from __future__ import annotations

import ssl
import stat
import tempfile
from pathlib import Path
from typing import Final

from epp.config import Config, Tls
from epp.errors import ConfigError

_LONGEST_SOCKET_BYTES: Final = 107
"""Of a unix socket's path, on Linux."""


def inspect(config: Config) -> list[str]:
    """Remarks for a person. ConfigError names the field, what is wrong with it, and what to do."""
    if config.listen.tls is not None:
        _check_tls(config.listen.tls, field="listen.tls")
    for address in config.listen.addresses(workers=config.workers):
        if address.startswith("unix:"):
            _check_socket(Path(address.removeprefix("unix:")), field="listen.address")
    if config.envoy.eds_file:
        _check_folder(_nearest(Path(config.envoy.eds_file).absolute().parent), field="envoy.edsFile")
    return _remarks(config)


def _remarks(config: Config) -> list[str]:
    """Envoy's own certificates: looked at where they are in sight."""
    if (tls := config.envoy.tls) is None:
        return []
    missing = [
        f"envoy.tls.{name}: {path}: no such file here: Envoy needs it where Envoy runs"
        for name, path in _files(tls)
        if not Path(path).exists()
    ]
    if not missing:
        _check_tls(tls, field="envoy.tls")
    return missing


def _files(tls: Tls) -> list[tuple[str, str]]:
    named = (
        ("certFile", tls.cert_file),
        ("keyFile", tls.key_file),
        ("clientCaFile", tls.client_ca_file),
        ("caFile", tls.ca_file),
    )
    return [(name, path) for name, path in named if path]


def _check_tls(tls: Tls, *, field: str) -> None:
    for name, path in _files(tls):
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{field}.{name}: {path}: {error.strerror}; {_to_do(error)}") from error
        if name != "keyFile":
            _check_certificates(text, where=f"{field}.{name}: {path}")
    try:
        # A passphrase is asked for by nobody: without one a key that has it is refused instead.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert_file, tls.key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{field}.keyFile: {tls.key_file}: is not the key of certFile {tls.cert_file}, is not PEM, or has a passphrase; "
            "name the matching key, in PEM and without a passphrase"
        ) from error


def _check_certificates(text: bytes, *, where: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{where}: holds no certificate that can be read; it must be PEM, with BEGIN CERTIFICATE"
        ) from error


def _check_socket(path: Path, *, field: str) -> None:
    if len(str(path).encode()) > _LONGEST_SOCKET_BYTES:
        raise ConfigError(
            f"{field}: {path}: a unix socket's path has {_LONGEST_SOCKET_BYTES} bytes at most; choose a shorter one"
        )
    _check_folder(path.parent, field=field)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{field}: {path}: is there and is no socket; remove it, or choose another path")


def _check_folder(folder: Path, *, field: str) -> None:
    """By writing: permissions, read-only mounts and full disks all count."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"{field}: nothing can be written in {folder}: {error.strerror}; {_to_do(error)}"
        ) from error


def _nearest(folder: Path) -> Path:
    """What exists of it: the picker makes the rest."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _to_do(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "make it, or correct the path"
        case PermissionError():
            return "give this user access, or name another path"
        case NotADirectoryError():
            return "a part of this path is a file: correct it"
        case _:
            return "name another path"
