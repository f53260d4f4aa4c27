"""TLS of the listener and of the connection to the picker, as Envoy transport sockets.

Certificates come through the files of `sds`, so that Envoy follows renewed ones.
Called by the listener and the clusters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import ConfigSource, PathConfigSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CommonTlsContext,
    DownstreamTlsContext,
    SdsSecretConfig,
    UpstreamTlsContext,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage

from epp.envoy import sds

if TYPE_CHECKING:
    from epp.config.settings import Config


def downstream(config: Config, *, protocols: list[str]) -> TransportSocket | None:
    """TLS for the gateway's clients, if configured. With a client CA it is mutual TLS."""
    tls = config.envoy.tls
    if tls is None:
        return None
    context = DownstreamTlsContext(
        common_tls_context=CommonTlsContext(
            tls_certificate_sds_secret_configs=[_secret(config, sds.GATEWAY_IDENTITY)],
            validation_context_sds_secret_config=(
                _secret(config, sds.CLIENT_TRUST) if tls.client_ca_file else None
            ),
            alpn_protocols=protocols,
        ),
        # Without this, a certificate is checked only if a client sends one.
        require_client_certificate=True if tls.client_ca_file else None,
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def upstream(config: Config) -> TransportSocket | None:
    """TLS to the picker, if the picker has it.

    An upstream context without trusted CAs encrypts but accepts any peer, without a warning. If the picker
    asks for client certificates, Envoy shows the picker's own pair, so the client CA must have signed it.
    """
    tls = config.listen.tls
    if tls is None:
        return None
    context = UpstreamTlsContext(
        common_tls_context=CommonTlsContext(
            tls_certificate_sds_secret_configs=(
                [_secret(config, sds.PICKER_CLIENT)] if tls.client_ca_file else []
            ),
            validation_context_sds_secret_config=_secret(config, sds.PICKER_TRUST),
            alpn_protocols=["h2"],
        )
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def _secret(config: Config, name: str) -> SdsSecretConfig:
    source = ConfigSource(path_config_source=PathConfigSource(path=sds.path(config, name)))
    return SdsSecretConfig(name=name, sds_config=source)
