"""TLS of the ext_proc server: certificates as files, read again when they change.

gRPC asks for the configuration at each handshake, on a thread of its own; a look at three modification times answers it. Files
that cannot be read (half-way through a renewal, say) leave the certificates that work in place; the next handshake looks again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from epp.config import Tls
from epp.errors import ConfigError

_log = logging.getLogger(__name__)


class Certificates:
    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._files = [Path(p) for p in (tls.cert_file, tls.key_file, tls.client_ca_file) if p]
        try:
            self._seen = self._stamp()
            self._first = self._read()
        except OSError as error:
            raise ConfigError(f"listen.tls: {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ServerCredentials:
        """Clients must show a certificate where a client CA is configured."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None is allowed, and means: no change
            require_client_authentication=bool(self._tls.client_ca_file),
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates; None: what is in use stays."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            fresh = self._read()
        except OSError as error:
            _log.warning("certificates cannot be read, the old ones stay: %s", error)
            return None
        self._seen = stamp
        _log.info("certificates were renewed: %s", self._tls.cert_file)
        return fresh

    def _stamp(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(s.st_mtime_ns, s.st_ino, s.st_size) for s in stats]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert, key = Path(self._tls.cert_file).read_bytes(), Path(self._tls.key_file).read_bytes()
        ca = Path(self._tls.client_ca_file).read_bytes() if self._tls.client_ca_file else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
