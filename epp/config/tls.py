"""Certificates, as the `listen` and `envoy` sections of the configuration name them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Strict


class Tls(Strict, frozen=True):
    """Certificates as PEM files, read at start and again when they change.
    Replace them by rename: Envoy sees no other change.
    """

    cert_file: Annotated[str, Meta(description="The certificate, with the intermediate ones after it.")]
    key_file: Annotated[str, Meta(description="The private key of the certificate.")]
    client_ca_file: Annotated[
        str, Meta(description="If set, clients must show a certificate that this CA has signed (mTLS).")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="Only in `listen.tls`: the CA that Envoy trusts for the picker. Empty means `certFile` itself."
        ),
    ] = ""
