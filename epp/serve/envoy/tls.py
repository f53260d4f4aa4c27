"""Makes the TLS settings of the listener and of the connection to the picker, as Envoy transport sockets.

Certificates come through the files of `sds`, so that Envoy follows renewed ones. `client_listener` and
`clusters` call this module.
"""

from __future__ import annotations

from typing import Any

from epp.config.settings import Config
from epp.serve.envoy import sds
from epp.serve.envoy.messages import Message, extension


def downstream(config: Config, *, protocols: list[str]) -> Message:
    """Return the field with TLS for the gateway's clients, if configured. With a client CA, clients have to
    show a certificate too (mutual TLS).
    """
    tls = config.envoy.tls
    if tls is None:
        return {}
    common: Message = {
        "tls_certificate_sds_secret_configs": [_secret(config, sds.GATEWAY_IDENTITY)],
        "alpn_protocols": protocols,
    }
    if not tls.client_ca_file:
        return _socket("DownstreamTlsContext", common_tls_context=common)
    common["validation_context_sds_secret_config"] = _secret(config, sds.CLIENT_TRUST)
    # Without the second field, a certificate is checked only if a client sends one.
    return _socket("DownstreamTlsContext", common_tls_context=common, require_client_certificate=True)


def upstream(config: Config) -> Message:
    """Return the field with TLS to the picker, if the picker has it.

    An upstream context without trusted CAs encrypts but accepts any peer, without a warning. If the picker
    asks for client certificates, Envoy shows the picker's own pair, so the client CA must have signed it.
    """
    tls = config.listen.tls
    if tls is None:
        return {}
    common: Message = {
        "validation_context_sds_secret_config": _secret(config, sds.PICKER_TRUST),
        "alpn_protocols": ["h2"],
    }
    if tls.client_ca_file:
        common["tls_certificate_sds_secret_configs"] = [_secret(config, sds.PICKER_CLIENT)]
    return _socket("UpstreamTlsContext", common_tls_context=common)


def _socket(kind: str, **context: Any) -> Message:
    name = "transport_sockets.tls"
    return {"transport_socket": extension(name, f"extensions.{name}.v3.{kind}", **context)}


def _secret(config: Config, name: str) -> Message:
    return {"name": name, "sds_config": {"path_config_source": {"path": sds.path(config, name)}}}
