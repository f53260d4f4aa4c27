"""TLS of the listener and of the connection to the picker, as Envoy transport sockets.

Envoy reads the PEM files once, at its start. Called by the listener and the clusters.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import DataSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    DownstreamTlsContext,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage

if TYPE_CHECKING:
    from epp.config import Tls


def downstream(tls: Tls, *, protocols: list[str]) -> TransportSocket:
    """TLS that the gateway's clients meet; mTLS when a client CA is set."""
    context = DownstreamTlsContext(
        common_tls_context=CommonTlsContext(
            tls_certificates=[_certificate(tls)],
            validation_context=_trust(tls.client_ca_file) if tls.client_ca_file else None,
            alpn_protocols=protocols,
        ),
        # Without it a certificate is checked only when a client happens to send one.
        require_client_certificate=True if tls.client_ca_file else None,
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def upstream(tls: Tls) -> TransportSocket:
    """TLS towards the picker, which shares this configuration: its own certificate file is what is trusted.

    An upstream context with no trust set encrypts and accepts any peer, without a word. Where the picker asks for
    client certificates, Envoy shows the same pair, so the client CA must have signed it.
    """
    context = UpstreamTlsContext(
        common_tls_context=CommonTlsContext(
            tls_certificates=[_certificate(tls)] if tls.client_ca_file else [],
            validation_context=_trust(tls.cert_file),
            alpn_protocols=["h2"],
        )
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def _certificate(tls: Tls) -> TlsCertificate:
    return TlsCertificate(certificate_chain=_pem(tls.cert_file), private_key=_pem(tls.key_file))


def _trust(ca_file: str) -> CertificateValidationContext:
    return CertificateValidationContext(trusted_ca=_pem(ca_file))


def _pem(path: str) -> DataSource:
    # Envoy may be started from another directory than the picker.
    return DataSource(filename=os.path.abspath(path))  # noqa: PTH100 - resolves no links: a mounted secret swaps them
