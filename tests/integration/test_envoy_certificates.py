"""Certificates that are renewed while the gateway runs. Envoy goes on asking the picker, and clients see the
new certificate.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from epp.base.types import Address
from tests.harness.certificate import CERTIFICATE, make_certificate, replace_file, write_tls
from tests.harness.envoy import PICKER
from tests.harness.gateway import Gateway, running_gateway, running_picker
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


async def shown_certificate(address: Address) -> str:
    """Return the certificate that the gateway shows to a client, as PEM."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    session: ssl.SSLObject = writer.get_extra_info("ssl_object")
    der = session.getpeercert(binary_form=True)
    writer.close()
    assert der
    return ssl.DER_cert_to_PEM_cert(der)


async def assert_picked(gateway: Gateway) -> None:
    bypassed = await gateway.envoy.bypassed()
    reply = await gateway.client.complete()
    assert reply.status == 200
    assert await gateway.envoy.bypassed() == bypassed
    assert await gateway.picker.decision(reply.headers["x-request-id"]) is not None


@pytest.mark.core
@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mtls"])
async def test_a_picker_with_a_renewed_certificate_is_asked_as_before(
    tmp_path: Path, *, mutual: bool
) -> None:
    tls = write_tls(tmp_path, mutual=mutual)
    fields = {"certFile": tls.cert_file, "keyFile": tls.key_file}
    listen = {
        "address": f"127.0.0.1:{free_port()}",
        "tls": {**fields, "clientCaFile": tls.client_ca_file},
    }
    async with running_gateway(tmp_path, listen=listen, envoy={"tls": fields}) as gateway:
        await assert_picked(gateway)
        address = Address.parse(gateway.config.envoy.listen)
        assert await shown_certificate(address) == CERTIFICATE

        cert, key = make_certificate(tmp_path, "renewed")
        replace_file(key, Path(tls.key_file))
        replace_file(cert, Path(tls.cert_file))
        await gateway.picker.process.terminate()
        await gateway.envoy.wait_stat_is(f"{PICKER}membership_healthy", 0)
        async with running_picker(gateway.config, directory=tmp_path, name="renewed") as picker:
            gateway.picker = picker
            await gateway.envoy.wait_stat_is(f"{PICKER}membership_healthy", 1)
            await assert_picked(gateway)

            async def renewed() -> bool:
                return await shown_certificate(address) == cert.read_text()

            await wait_until(renewed, what="clients see the renewed certificate")
