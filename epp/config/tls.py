"""Defines the fields for certificates in the `listen` and `envoy` sections of the configuration."""

from __future__ import annotations

from epp.config.strict import Strict


class Tls(Strict, frozen=True):
    """Certificates as PEM files. They are read at start and again when they change. Replace a file by
    renaming another file over it, because Envoy notices no other change.
    """

    cert_file: str
    """File with the certificate, followed by the intermediate certificates."""
    key_file: str
    """File with the private key of the certificate."""
    client_ca_file: str = ""
    """CA file. If set, clients must show a certificate that this CA has signed (mTLS)."""
    ca_file: str = ""
    """Only in `listen.tls`: file with the CA by which Envoy verifies the picker. Empty means `certFile`
    itself."""
