"""Checks whether a certificate and its key can be used: both can be read, they belong together, and the
certificate has not expired.

A failed renewal does not show while the old pair is still in use. Later every handshake fails.
`CertificateWatch` therefore checks the files every few seconds, so that an alert fires before the handshakes
fail. `preflight` (`epp check`) and `app` call this module.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # typeshed lacks it; `ssl` shows dates of CA certificates only
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError
from epp.config.listening import Tls

_log = logging.getLogger(__name__)

_LOOK_S: Final = 10.0
_MOST_BYTES: Final = 2**20


def files_of(tls: Tls) -> list[tuple[str, str]]:
    """Return the configured files, with the names of their fields."""
    named = (
        ("certFile", tls.cert_file),
        ("keyFile", tls.key_file),
        ("clientCaFile", tls.client_ca_file),
        ("caFile", tls.ca_file),
    )
    return [(name, path) for name, path in named if path]


def check_tls(tls: Tls, *, field: str, unix_now_s: float) -> None:
    """Check the configured certificates. Raise ConfigError, which names the field, the fault, and what
    to do.
    """
    for name, path in files_of(tls):
        try:
            with Path(path).open("rb") as file:
                text = file.read(_MOST_BYTES)
        except OSError as error:
            raise ConfigError(f"{field}.{name}: {path}: {error.strerror}; {to_do(error)}") from error
        if name != "keyFile":
            _check_certificates(text, where=f"{field}.{name}: {path}")
        if name == "certFile":
            _check_expiry(path, where=f"{field}.{name}: {path}", unix_now_s=unix_now_s)
    try:
        # An empty passphrase keeps OpenSSL from asking for one on the terminal. A key with a passphrase is
        # then refused.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert_file, tls.key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{field}.keyFile: {tls.key_file}: this key does not belong to certFile {tls.cert_file}, is not "
            "PEM, or has a passphrase; "
            "name the matching key, in PEM and without a passphrase"
        ) from error


def to_do(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "create it, or correct the path"
        case PermissionError():
            return "give this user access, or name another path"
        case NotADirectoryError():
            return "one part of this path is a file and not a folder: correct the path"
        case _:
            return "name another path"


def _check_certificates(text: bytes, *, where: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{where}: this file holds no certificate that can be read; it must be PEM, with the line BEGIN "
            "CERTIFICATE"
        ) from error


def _check_expiry(path: str, *, where: str, unix_now_s: float) -> None:
    """Check the first certificate, which is the server's own. A date that cannot be read is ignored."""
    try:
        until_s = ssl.cert_time_to_seconds(_test_decode_cert(path)["notAfter"])
    except (ssl.SSLError, ValueError, KeyError):
        return
    if until_s <= unix_now_s:
        until = datetime.fromtimestamp(until_s, UTC)
        raise ConfigError(f"{where}: the certificate expired at {until:%Y-%m-%d %H:%M} UTC; renew it")


class CertificateWatch:
    """Calls `on_result` with whether the files can be used: after the first check, and after each change."""

    def __init__(
        self,
        tls: Tls,
        *,
        field: str,
        on_result: Callable[[bool], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tls = tls
        self._field = field
        self._on_result = on_result
        self._unix_clock = unix_clock
        self._fault: str | None = None

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        fault = await asyncio.to_thread(self._find_fault)
        if fault == self._fault:
            return
        if fault:
            _log.error("TLS handshakes fail now, or will fail after the next start: %s", fault)
        elif self._fault is not None:
            _log.info("%s can be used again", self._field)
        self._fault = fault
        self._on_result(not fault)

    def _find_fault(self) -> str:
        try:
            check_tls(self._tls, field=self._field, unix_now_s=self._unix_clock())
        except ConfigError as error:
            return str(error)
        return ""
