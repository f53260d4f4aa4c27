"""The real Envoy's status page, blocked paths, filter of API keys, and renewed certificates."""

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from epp.base.types import Address
from epp.config.settings import BLOCKED_PATHS
from tests.contract.spellings import combined, single
from tests.contract.vllm_routes import SAMPLES, reaches_operators
from tests.harness.certificate import CERTIFICATE, make_certificate, replace_file, write_tls
from tests.harness.client import http_client
from tests.harness.envoy import PICKER, connection_manager
from tests.harness.gateway import EnvoyBench, Gateway, running_bootstrap, running_gateway, running_picker
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.raw_http import send_raw

pytestmark = pytest.mark.envoy


async def test_probes_and_prometheus_get_their_page_and_nothing_else(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        http_client(f"http://{status}") as watcher,
    ):
        assert (await bench.client.complete()).status == 200
        assert (await watcher.get("/ready")).body == b"LIVE\n"
        page = (await watcher.get("/stats/prometheus?usedonly")).body.decode()
        assert re.search(
            r'^envoy_cluster_upstream_rq_total\{envoy_cluster_name="picker"\} [1-9]', page, re.MULTILINE
        )
        for path in (
            "/",
            "/config_dump",
            "/certs",
            "/stats",
            "/help",
            "/ready/x",
            "/stats/prometheus/../../config_dump",
        ):
            assert (await watcher.get(path)).status == 404, path
        for path in ("/ready", "/stats/prometheus", "/quitquitquit", "/drain_listeners", "/healthcheck/fail"):
            assert (await watcher.request("POST", path)).status == 404, path
        assert (await watcher.get("/ready")).status == 200
        assert (await bench.client.get("/stats/prometheus")).served_by, (
            "clients of the gateway reach no page of Envoy"
        )


async def test_a_failed_health_check_fails_the_probe(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        http_client(f"http://{status}") as watcher,
        http_client(bench.envoy.admin_url) as admin,
    ):
        assert (await admin.request("POST", "/healthcheck/fail")).status == 200
        assert (await watcher.get("/ready")).status == 503
        assert (await admin.request("POST", "/drain_listeners?inboundonly")).status == 200
        assert (await watcher.get("/ready")).status == 503, (
            "the status page stays when the gateway's port is closed"
        )


async def test_an_unfinished_request_to_the_status_page_gets_408(tmp_path: Path) -> None:
    status = Address("127.0.0.1", free_port())
    async with running_bootstrap(tmp_path, envoy={"status": str(status)}):
        assert (await send_raw(status, b"GET /ready HTTP/1.1\r\nhost: a\r\n")).status == 408


async def status_of_path(address: Address, path: str) -> int | None:
    """Send the path byte for byte, which no HTTP client does. Return the status, or None when the answer
    could not be read.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode())
        words = (await reader.readline()).split(maxsplit=2)
        return int(words[1]) if words else None
    finally:
        writer.close()


async def ask_all(address: Address, targets: list[str]) -> None:
    for start in range(0, len(targets), 20):
        await asyncio.gather(*(status_of_path(address, target) for target in targets[start : start + 20]))


async def test_paths_for_operators_are_404_in_json_and_reach_no_server(bench: EnvoyBench) -> None:
    bench.picker.always(bench.backends[0].address)
    for path in BLOCKED_PATHS:
        for method in ("GET", "POST"):
            reply = await bench.client.request(method, path)
            assert reply.status == 404
            assert reply.headers["content-type"] == "application/json"
            assert reply.json()["error"] == {
                "code": "path_not_served",
                "message": "not served by this gateway",
                "param": None,
                "type": "not_found_error",
            }
    assert all(not backend.received for backend in bench.backends)
    assert bench.picker.exchanges == []
    assert await bench.envoy.bypassed() == 0


async def test_no_spelling_of_a_blocked_path_gets_to_a_server_that_would_know_it(bench: EnvoyBench) -> None:
    """The picker here refuses nothing. Spellings that vLLM does not know may pass."""
    bench.picker.always(bench.backends[0].address)
    gateway = Address.parse(bench.config.envoy.listen)
    targets = [t for path in SAMPLES for t in (*single(path), *combined(path, count=5, seed=2))]
    await ask_all(gateway, targets)
    reached = [received.target for received in bench.backends[0].received]
    assert [target for target in reached if reaches_operators(target)] == []
    assert len(reached) > 50, "other names, such as `metrics#fragment`, are not blocked"


async def test_the_picker_refuses_blocked_paths_if_the_gateway_lets_them_pass(tmp_path: Path) -> None:
    def without_routes(document: dict[str, Any]) -> None:
        (host,) = connection_manager(document)["route_config"]["virtual_hosts"]
        del host["routes"][:-1]
        for setting in ("normalize_path", "merge_slashes", "path_with_escaped_slashes_action"):
            del connection_manager(document)[setting]

    async with running_gateway(tmp_path, edit=without_routes, backends=1) as site:
        gateway = Address.parse(site.config.envoy.listen)
        targets = [t for path in SAMPLES for t in (path, *combined(path, count=5, seed=3))]
        await ask_all(gateway, targets)
        reached = [r.target for r in site.backends[0].prompts]
        assert [target for target in reached if reaches_operators(target)] == []
        reply = await site.client.request("POST", "/sleep")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "path_not_served")
        assert (await site.client.get("/v1/models")).status == 200
        assert await site.picker.metric("epp_refused_total", reason="path_not_served") > len(SAMPLES)


TYPE = "type.googleapis.com/envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth"


def filter_of(path: Path) -> dict[str, Any]:
    """Return the filter that docs/security.md shows, with the file of this test."""
    watched = {"path": str(path), "watched_directory": {"path": str(path.parent)}}
    source = {"resource_api_version": "V3", "path_config_source": watched}
    return {"name": "api-keys", "config_discovery": {"config_source": source, "type_urls": [TYPE]}}


def write_keys(path: Path, *keys: str) -> None:
    """Write the keys as Kubernetes updates a mounted Secret: a link to the folder with the new state replaces
    the old link.
    """
    auth = {
        "@type": TYPE,
        "credentials": [{"key": key, "client": f"client-{n}"} for n, key in enumerate(keys)],
        "key_sources": [{"header": "authorization"}],
        "forwarding": {"hide_credentials": True},
    }
    extension = {"@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig", "name": "api-keys"}
    state = path.parent / f"..{keys[0]}"
    state.mkdir(parents=True)
    (state / path.name).write_text(json.dumps({"resources": [{**extension, "typed_config": auth}]}))
    following = path.parent / "..data_tmp"
    following.symlink_to(state.name)
    following.rename(path.parent / "..data")
    if not path.is_symlink():
        path.symlink_to(Path("..data") / path.name)


async def test_only_clients_with_a_key_get_in_and_keys_change_without_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "api-keys" / "keys.yaml"
    write_keys(keys, "first")
    async with running_gateway(
        tmp_path, backends=1, envoy={"extraHttpFilters": [filter_of(keys)]}
    ) as gateway:

        async def status(key: str) -> int:
            return (await gateway.client.complete("hello", headers={"authorization": f"Bearer {key}"})).status

        async def is_so() -> bool:
            return (await status("first"), await status("second")) == (200, 401)

        await wait_until(is_so, what="Envoy knows the first key")
        refused = await gateway.client.complete("hello")
        assert (refused.status, refused.json()["error"]["code"]) == (401, "not_authenticated")
        assert "authorization" not in gateway.backends[0].prompts[-1].headers, "the key stays at the gateway"
        write_keys(keys, "second")

        async def is_turned() -> bool:
            return (await status("first"), await status("second")) == (401, 200)

        await wait_until(is_turned, what="Envoy knows the second key and no longer the first")


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
