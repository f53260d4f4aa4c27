"""Rows through the real Envoy, configured as a Gateway does: full duplex both ways, failing closed, a subset
hint. The picker gets the whole body of requests and answers in pieces and has to send both back.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from epp.tools.conformance.dataplane import DESTINATION, SUBSET_HINT
from tests.conformance.picker import CALM
from tests.harness.envoy import connection_manager
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("controllable"),
]

SUBSET_HEADER = "x-test-subset"
FAIL_CLOSED: dict[str, Any] = {"holdStreams": False, "envoy": {"failOpen": False, "messageTimeoutSeconds": 5}}


def as_a_gateway(document: dict[str, Any]) -> None:
    """Configure full duplex, trailers included, and a filter before the picker that turns a header into the
    subset hint.
    """
    filters = connection_manager(document)["http_filters"]
    mode = filters[0]["typed_config"]["processing_mode"]
    mode.update(
        request_body_mode="FULL_DUPLEX_STREAMED",
        response_body_mode="FULL_DUPLEX_STREAMED",
        request_trailer_mode="SEND",
        response_trailer_mode="SEND",
    )
    value = {"metadata_namespace": SUBSET_HINT, "key": f"{DESTINATION}-subset", "type": "STRING"}
    hint = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [{"header": SUBSET_HEADER, "on_header_present": value, "remove": True}],
    }
    filters.insert(0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": hint})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def duplex(
    controllable: None, tmp_path_factory: pytest.TempPathFactory, both_transports: None
) -> AsyncIterator[Gateway]:
    """Envoy, our picker with the conformance headers on, and three model servers."""
    directory = tmp_path_factory.mktemp("duplex")
    async with running_gateway(
        directory, policy=CALM, edit=as_a_gateway, conformanceHeaders=True, **FAIL_CLOSED
    ) as gateway:
        yield gateway


@pytest.mark.parametrize("size", [100, 70_000, 3_000_000])
async def test_row_02_bodies_pass_through_the_picker_unchanged(duplex: Gateway, size: int) -> None:
    """The server gets every byte that the client sent, though Envoy kept no copy."""
    body = json.dumps({"model": "m", "prompt": "".join(chr(97 + n % 26) for n in range(size))}).encode()
    reply = await duplex.client.request("POST", "/v1/completions", body=body)
    assert reply.status == 200
    (received,) = [r for b in duplex.backends for r in b.prompts if r.body == body]
    assert received.headers[DESTINATION]


async def test_row_02_a_streamed_answer_passes_through_the_picker_unchanged(duplex: Gateway) -> None:
    """Server-sent events arrive whole and in order."""
    async with duplex.client.stream("stream it") as answer:
        pieces = (await answer.rest()).split(b"\n\n")
    assert answer.status == 200
    assert pieces[0] == b'data: {"choices": [{"text": "%s-0 "}]}' % answer.served_by.encode()
    assert pieces[-2:] == [b"data: [DONE]", b""]


async def test_row_01_requests_without_a_body_pass(duplex: Gateway) -> None:
    """Without a body there is nothing to stream, so the picker decides by the headers alone."""
    for method in ("GET", "POST", "HEAD"):
        assert (await duplex.client.request(method, "/v1/models")).status == 200


async def test_row_01_many_at_once_pass(duplex: Gateway) -> None:
    """Streams do not mix: each of the requests sent together gets its own answer, and none is refused."""
    prompts = [f"number {n} " * 500 for n in range(24)]
    replies = await asyncio.gather(*(duplex.client.complete(p) for p in prompts))
    assert [r.status for r in replies] == [200] * 24
    seen = [json.loads(r.body)["prompt"] for b in duplex.backends for r in b.prompts if b"number" in r.body]
    assert sorted(seen) == sorted(prompts)


async def test_row_03_the_subset_hint_binds_the_data_plane(duplex: Gateway) -> None:
    """A filter before the picker allows some servers, and requests reach only these. If it allows none, the
    answer is 503.
    """
    for allowed in (duplex.backends[:1], duplex.backends[1:]):
        hint = {SUBSET_HEADER: ",".join(str(b.address) for b in allowed)}
        replies = [await duplex.client.complete(f"{n}", headers=hint) for n in range(4)]
        replies += [await duplex.client.get("/v1/models", headers=hint)]
        assert {r.served_by for r in replies} <= {b.name for b in allowed}
    none = {SUBSET_HEADER: "203.0.113.1:80"}
    for reply in (
        await duplex.client.complete(headers=none),
        await duplex.client.get("/v1/models", headers=none),
    ):
        assert reply.status == 503


async def test_row_10_a_conformance_run_steers_and_hears_who_served(duplex: Gateway) -> None:
    """The request is like those of a Gateway's conformance tests: it names a server, and the answer says that
    this server served.
    """
    for backend in duplex.backends:
        for name in (str(backend.address), f"{backend.address},{duplex.backends[0].address}"):
            reply = await duplex.client.complete(headers={"test-epp-endpoint-selection": name})
            assert reply.served_by == backend.name
            assert reply.headers["x-conformance-test-served-endpoint"] == str(backend.address)


async def test_row_12_a_bad_request_is_refused_before_any_server_sees_it(duplex: Gateway) -> None:
    """The client gets the error as JSON with the error's status, in full duplex too."""
    await duplex.picker.reads_bodies()
    before = sum(len(b.prompts) for b in duplex.backends)
    reply = await duplex.client.request("POST", "/v1/chat/completions", body=b"{}")
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert sum(len(b.prompts) for b in duplex.backends) == before


async def test_row_14_a_drain_cuts_no_answer_that_passes_through_the_picker(
    tmp_path: Path, both_transports: None
) -> None:
    """When the gateway fails closed, a cut stream would be a cut answer. The picker therefore stays until its
    streams are over, and it answers new ones.
    """
    async with running_gateway(tmp_path, policy=CALM, edit=as_a_gateway, **FAIL_CLOSED) as gateway:
        for backend in gateway.backends:
            backend.behaviour.chunks = 3
            backend.behaviour.before_last.shut()
        async with AsyncExitStack() as stack:
            opening = (stack.enter_async_context(gateway.client.stream(f"{n}")) for n in range(8))
            answers = await asyncio.gather(*opening)
            gateway.picker.process.signal(signal.SIGTERM)
            await wait_until(lambda: _not_ready(gateway), what="the picker drains")
            for backend in gateway.backends:
                backend.behaviour.before_last.open()
            assert {(await gateway.client.complete("new")).status for _ in range(4)} == {200}
            bodies = await asyncio.gather(*(a.rest() for a in answers))
            assert [body.endswith(b"[DONE]\n\n") for body in bodies] == [True] * 8
        assert await gateway.picker.process.wait() == 0


async def _not_ready(gateway: Gateway) -> bool:
    return not await gateway.picker.ready()
