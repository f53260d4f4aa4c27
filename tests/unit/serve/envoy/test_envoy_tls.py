"""TLS to the clients and to the picker: nothing is left unverified."""

from __future__ import annotations

import pytest

from epp.config.listening import Listen
from epp.config.tls import Tls
from epp.serve.envoy import sds, tls
from tests.unit.serve.envoy.configs import a_config

PAIR = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key")
MUTUAL = Tls(cert_file="/tls/tls.crt", key_file="/tls/tls.key", client_ca_file="/ca/ca.crt")


def test_without_certificates_there_is_no_tls() -> None:
    assert tls.downstream(a_config(), protocols=["h2"]) == tls.upstream(a_config()) == {}


@pytest.mark.parametrize("certificates", [PAIR, MUTUAL], ids=["plain", "mutual"])
def test_with_a_client_ca_a_client_must_show_a_certificate(certificates: Tls) -> None:
    made = tls.downstream(a_config(tls=certificates), protocols=["h2", "http/1.1"])
    context = made["transport_socket"]["typed_config"]
    mutual = certificates is MUTUAL
    assert context.get("require_client_certificate", False) is mutual
    assert ("validation_context_sds_secret_config" in context["common_tls_context"]) is mutual
    assert context["common_tls_context"]["alpn_protocols"] == ["h2", "http/1.1"]


@pytest.mark.parametrize("certificates", [PAIR, MUTUAL], ids=["plain", "mutual"])
def test_envoy_verifies_the_picker_and_shows_a_certificate_only_if_asked(certificates: Tls) -> None:
    config = a_config(listen=Listen(tls=certificates))
    context = tls.upstream(config)["transport_socket"]["typed_config"]["common_tls_context"]
    trust = context["validation_context_sds_secret_config"]
    assert trust["name"] == sds.PICKER_TRUST
    assert trust["sds_config"]["path_config_source"]["path"] == sds.path(config, sds.PICKER_TRUST)
    shown = [each["name"] for each in context.get("tls_certificate_sds_secret_configs", ())]
    assert shown == ([sds.PICKER_CLIENT] if certificates.client_ca_file else [])
    assert context["alpn_protocols"] == ["h2"]
