"""Certificates, as the `listen` and `envoy` sections of the configuration name them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Strict


class Tls(Strict, frozen=True):
    """Certificates as PEM files. They are read at start and again when they change. Replace a file by
    renaming another file over it, because Envoy notices no other change.
    """

    cert_file: Annotated[
        str, Meta(description="File with the certificate, followed by the intermediate certificates.")
    ]
    key_file: Annotated[str, Meta(description="File with the private key of the certificate.")]
    client_ca_file: Annotated[
        str,
        Meta(description="CA file. If set, clients must show a certificate that this CA has signed (mTLS)."),
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="Only in `listen.tls`: file with the CA by which Envoy verifies the picker. Empty "
            "means `certFile` itself."
        ),
    ] = ""
