"""Reads the certificates of the ext_proc server from files, and again when the files change.

The transport compares the modification times of the files before a handshake. If the files cannot be read or
do not belong together (for example in the middle of a renewal), the old certificates stay in use.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from epp.base.errors import ConfigError
from epp.config.tls import Tls

_log = logging.getLogger(__name__)


class Certificates:
    """Holds the TLS context from the last time when the files fitted together."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._files = [Path(p) for p in (tls.cert_file, tls.key_file, tls.client_ca_file) if p]
        try:
            self._seen = self._stamp()
            self._latest = ssl_context(tls)
        except ssl.SSLError as error:
            raise ConfigError(f"listen.tls: {tls.cert_file}, {tls.key_file}: {_words(error)}") from error
        except OSError as error:
            raise ConfigError(f"listen.tls: {error.filename}: {error.strerror}") from error

    def current(self) -> ssl.SSLContext:
        """Return the context, made anew if the files have changed."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._latest = ssl_context(self._tls)
                self._seen = stamp
                _log.info("certificates were renewed: %s", self._tls.cert_file)
        except OSError as error:  # ssl.SSLError is an OSError
            _log.warning("the new certificates cannot be used; the old ones stay in use: %s", error)
        return self._latest

    def _stamp(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._files]
        return [(s.st_mtime_ns, s.st_ino, s.st_size) for s in stats]


def ssl_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of an HTTP/2 server. Clients must show a certificate if a client CA is
    configured. Raises OSError or ssl.SSLError.
    """
    for path in (tls.cert_file, tls.key_file, tls.client_ca_file):
        if path:
            Path(path).read_bytes()  # the error of ssl itself does not name the file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tls.cert_file, tls.key_file)
    if tls.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        # gRPC does the same: the file may hold an intermediate authority, or the certificate of one client.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(tls.client_ca_file)
    return context


def _words(error: ssl.SSLError) -> str:
    return error.reason or str(error)
