"""Certificates that are renewed while the gateway runs. Envoy goes on asking the picker, and clients see the
new certificate.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Final

import pytest

from epp.base.types import Address
from tests.harness.certificate import CERTIFICATE, write_tls
from tests.harness.envoy import PICKER
from tests.harness.gateway import Gateway, running_gateway, running_picker
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


def replace_text(path: str, text: str) -> None:
    """Replace a file by rename, as a renewal of certificates does."""
    temporary = Path(path).with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


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

        replace_text(tls.key_file, RENEWED_KEY)
        replace_text(tls.cert_file, RENEWED)
        await gateway.picker.process.terminate()
        await gateway.envoy.wait_stat_is(f"{PICKER}membership_healthy", 0)
        async with running_picker(gateway.config, directory=tmp_path, name="renewed") as picker:
            gateway.picker = picker
            await gateway.envoy.wait_stat_is(f"{PICKER}membership_healthy", 1)
            await assert_picked(gateway)

            async def renewed() -> bool:
                return await shown_certificate(address) == RENEWED

            await wait_until(renewed, what="clients see the renewed certificate")


RENEWED: Final = """\
-----BEGIN CERTIFICATE-----
MIIBojCCAUegAwIBAgIUEar0Puuly7I3441ov3b+QOSQX8cwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMcmVuZXdlZC50ZXN0MCAXDTI2MTEyMTEzNDUzOFoYDzIxMjYx
MDI4MTM0NTM4WjAXMRUwEwYDVQQDDAxyZW5ld2VkLnRlc3QwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAASjd7JwqaLYHKxa83KxXaWzn9BBaI5GM1Ah6MpCleRr9ti4
IORGsNH1dDetrs60E3swVO2llV2Fn2LF3eiBE1lro28wbTAdBgNVHQ4EFgQUtPkV
cWMeseP0q2TmF5i5C7xYM1wwHwYDVR0jBBgwFoAUtPkVcWMeseP0q2TmF5i5C7xY
M1wwDwYDVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEw
CgYIKoZIzj0EAwIDSQAwRgIhAKrPsDCxtj8M0m4ZJBcpIhMd1fHvYriVk8BslpLW
aAq6AiEAv7iALVq+CDEg6YRmUvVBEfmgO3OOADZGB48YiiYCqTI=
-----END CERTIFICATE-----
"""

RENEWED_KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgMb+NY17ZQH0oQs0m
gvmoVj+asbvKysCgttOHmz46w+mhRANCAASjd7JwqaLYHKxa83KxXaWzn9BBaI5G
M1Ah6MpCleRr9ti4IORGsNH1dDetrs60E3swVO2llV2Fn2LF3eiBE1lr
-----END PRIVATE KEY-----
"""
