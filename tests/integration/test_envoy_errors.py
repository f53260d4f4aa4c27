"""The errors that the real Envoy itself answers, on our bootstrap, in JSON as OpenAI writes it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from epp.base.types import Address
from tests.harness.gateway import EnvoyBench, Gateway, running_bootstrap, running_gateway
from tests.harness.processes import wait_until
from tests.harness.raw_http import send_raw

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

BODY = b'{"model": "m", "prompt": "hello"}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n"

GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 0\r\n\r\n"
MALFORMED = {
    "no HTTP at all": b"GARBAGE\r\n\r\n",
    "a space in a field name": GET + b"bad header: x\r\n\r\n",
    "a NUL in a field": GET + b"x: a\x00b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a fragment": b"GET /v1/models#x HTTP/1.1\r\nhost: a\r\n\r\n",
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "a length that is none": POST + b"content-length: abc\r\n\r\n",
    "a length and chunks": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a websocket by POST": POST + UPGRADE,
}
REFUSED = {name: (sent, 400, "malformed_request") for name, sent in MALFORMED.items()} | {
    "a transfer encoding": (POST + b"transfer-encoding: gzip\r\n\r\n", 501, "transfer_encoding"),
    "fields of 90 KB": (POST + b"x: " + b"a" * 90_000 + b"\r\n\r\n", 431, "headers_too_large"),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n", 404, "path_not_served"),
    "no path": (b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", 404, "path_not_served"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("errors"), backends=1) as running:
        yield running


def at(site: Gateway | EnvoyBench) -> Address:
    return Address.parse(site.config.envoy.listen)


@pytest.mark.parametrize(("request_bytes", "status", "code"), REFUSED.values(), ids=REFUSED)
async def test_an_invalid_request_gets_its_error_in_json(
    gateway: Gateway, request_bytes: bytes, status: int, code: str
) -> None:
    before = len(gateway.backends[0].prompts)
    reply = await send_raw(at(gateway), request_bytes)
    assert reply.status == status
    assert "content-type: application/json" in reply.head
    assert json.loads(reply.body)["type"] == "error", "as Anthropic's clients want it"
    error = reply.error()
    assert (error["code"], error["param"]) == (code, None)
    assert error["type"]
    assert error["message"]
    assert len(gateway.backends[0].prompts) == before


@pytest.mark.parametrize(
    "changed",
    [
        (b"HTTP/1.1\r\nhost: gateway", b"HTTP/1.0"),
        (b"host:", b"connection: Upgrade\r\nupgrade: TLS/1.2\r\nhost:"),
        (b"host:", b"connection: Upgrade\r\nupgrade: h2c\r\nhost:"),
    ],
)
async def test_old_clients_and_offered_upgrades_are_answered(
    gateway: Gateway, changed: tuple[bytes, bytes]
) -> None:
    head = POST.replace(*changed) + b"connection: close\r\n" * (b"Upgrade" not in changed[1])
    reply = await send_raw(at(gateway), head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
    assert reply.status == 200
    assert b"choices" in reply.body


@pytest.mark.parametrize("rest", [b"5\r\nhello\r\nZZ\r\n", b"ZZ\r\n", b"fffffffffffffffff\r\n"])
async def test_a_body_whose_chunks_make_no_sense_gets_400(gateway: Gateway, rest: bytes) -> None:
    """Envoy closes at once, so its 400 must not wait for the picker (`epp/serve/envoy/bootstrap.yaml`)."""
    before = len(gateway.backends[0].prompts)
    reply = await send_raw(at(gateway), POST + b"transfer-encoding: chunked\r\n\r\n" + rest)
    assert (reply.status, reply.error()["code"]) == (400, "malformed_request")
    assert reply.head.lower().count("connection: close") == 1
    assert len(gateway.backends[0].prompts) == before
    await wait_until(
        lambda: any(e["details"] == "http1.codec_error" for e in gateway.envoy.access_log()),
        what="the access log names the cause",
    )
    assert (await gateway.client.complete()).status == 200


async def test_a_hundred_header_fields_pass_and_too_many_get_431(gateway: Gateway) -> None:
    for fields in (92, 93, 96, 100, 118, 120, 121, 124, 128, 129, 200):
        added = b"".join(b"x-%d: y\r\n" % n for n in range(fields - 2))
        reply = await send_raw(at(gateway), POST + added + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        if fields <= 100:
            assert reply.status == 200, fields
        else:
            assert reply.status in (200, 431), fields
        if reply.status == 431:
            assert reply.error()["code"] == "headers_too_large"
    assert reply.status == 431


async def test_fields_as_long_as_envoy_takes_have_no_room_for_pick_and_get_431(gateway: Gateway) -> None:
    statuses = []
    for size in range(60_700, 61_500, 100):
        # The model server accepts lines of this length.
        lines = b"".join(b"x-%d: " % n + b"a" * (size // 8) + b"\r\n" for n in range(8))
        head = POST + lines + b"content-length: %d\r\n\r\n" % len(BODY)
        statuses.append((await send_raw(at(gateway), head + BODY)).status)
    assert set(statuses) == {200, 431}


async def test_the_pickers_own_errors_pass_as_they_are(gateway: Gateway) -> None:
    reply = await gateway.client.request("POST", "/v1/completions", body=b"{")
    assert (reply.status, reply.json()["error"]["code"]) == (400, "bad_json")
    assert reply.headers["content-type"] == "application/json"
    await wait_until(
        lambda: any(e["details"] == "picker_bad_json" for e in gateway.envoy.access_log()),
        what="the log names the client",
    )


async def test_a_gateway_that_fails_closed_answers_errors_in_json_too(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, envoy={"failOpen": False}) as bench:
        bench.picker.gate.shut()
        hung = await bench.client.complete()
        assert hung.status == 504
        assert hung.json()["error"] == {
            "code": "timeout",
            "message": "the gateway had no answer in time; try again later",
            "param": None,
            "type": "service_unavailable",
        }
        bench.picker.gate.open()
        await bench.picker.stop()
        gone = await bench.client.complete()
        assert (gone.status, gone.json()["error"]["code"]) == (503, "unavailable")


async def test_the_error_about_a_dead_server_does_not_show_its_address(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path) as bench:
        for backend in bench.backends:
            await backend.stop()
        reply = await bench.client.complete()
        assert reply.status == 503
        assert reply.json()["error"]["message"] == "no model server could take the request; try again later"
