"""Several workers of a picker behind one Envoy, and TLS on both sides of Envoy."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from epp.serve.envoy import files
from tests.harness.backend import running_backend
from tests.harness.certificate import CERTIFICATE, PRIVATE_KEY, write_tls
from tests.harness.client import http_client
from tests.harness.envoy import PICKER, running_envoy
from tests.harness.fake_picker import running_fake_picker
from tests.harness.gateway import EnvoyBench, config_in, running_bootstrap, write_eds
from tests.harness.ports import free_port

pytestmark = pytest.mark.envoy


async def requests(bench: EnvoyBench, count: int) -> None:
    replies = await asyncio.gather(*(bench.client.complete(f"{n}") for n in range(count)))
    assert [r.status for r in replies] == [200] * count


async def test_a_worker_that_hangs_is_left_out_until_it_answers_again(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, workers=2) as bench:
        hung, other = bench.pickers
        hung.gate.shut()
        await bench.envoy.wait_stat_is(f"{PICKER}membership_healthy", 1)
        await requests(bench, 10)
        assert len(other.exchanges) == 10
        assert await bench.envoy.bypassed() == 0
        hung.gate.open()
        await bench.envoy.wait_stat_is(f"{PICKER}membership_healthy", 2)


async def test_a_worker_that_leaves_keeps_the_streams_it_has(tmp_path: Path) -> None:
    """A draining worker reports itself as not healthy. Envoy must not cut the streams that the worker still
    holds.
    """
    async with running_bootstrap(tmp_path, workers=2) as bench:
        backend = bench.backends[0]
        backend.behaviour.before_last.shut()
        for picker in bench.pickers:
            picker.always(backend.address)
        async with AsyncExitStack() as stack:
            answers = [await stack.enter_async_context(bench.client.stream(f"{n}")) for n in range(4)]
            leaving = bench.pickers[0]
            assert leaving.open_streams == 2
            leaving.serving = False
            await bench.envoy.wait_stat_is(f"{PICKER}membership_healthy", 1)
            assert leaving.open_streams == 2
            bench.pickers[1].always(bench.backends[1].address)
            assert (await bench.client.complete()).served_by == "s1"
            assert len(leaving.exchanges) == 2
            backend.behaviour.before_last.open()
            assert all(b"[DONE]" in body for body in await asyncio.gather(*(a.rest() for a in answers)))


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mtls"])
async def test_envoy_asks_the_picker_over_tls_and_no_plain_picker_at_its_address(
    tmp_path: Path, *, mutual: bool
) -> None:
    tls = write_tls(tmp_path, mutual=mutual)
    fields = {"certFile": tls.cert_file, "keyFile": tls.key_file, "clientCaFile": tls.client_ca_file}
    address = f"127.0.0.1:{free_port()}"
    config = config_in(
        tmp_path, listen={"address": address, "tls": fields}, envoy={"tls": {**fields, "clientCaFile": ""}}
    )
    credentials = grpc.ssl_server_credentials(
        [(PRIVATE_KEY.encode(), CERTIFICATE.encode())],
        root_certificates=CERTIFICATE.encode() if mutual else None,
        require_client_auth=mutual,
    )
    async with (
        running_backend("s0") as backend,
        running_fake_picker(address, credentials=credentials) as picker,
    ):
        write_eds(config.envoy.eds_file, [backend.address])
        files.write_first(config)
        async with running_envoy(config, directory=tmp_path) as envoy, http_client(envoy.url) as client:
            assert envoy.url.startswith("https:")
            assert (await client.complete()).status == 200
            assert len(picker.exchanges) == 1
            await picker.stop()
            async with running_fake_picker(address) as plain:
                await envoy.wait_stat_is(f"{PICKER}membership_healthy", 0)
                assert (await client.complete()).status == 200
                assert plain.exchanges == []
