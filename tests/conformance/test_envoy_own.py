"""Rows that can be seen only with a data plane: the real Envoy, with the bootstrap that we
generate for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from epp.tools.conformance.dataplane import DESTINATION
from tests.conformance.picker import CALM
from tests.harness.client import OpenReply, Reply
from tests.harness.gateway import Gateway, answers_in_flight, running_gateway
from tests.harness.processes import wait_until

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("controllable"),
]

STREAMS = 8


def long(topic: object) -> str:
    """A prompt that is long enough to be worth remembering."""
    return f"a prompt about {topic}, said many times over. " * 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def through(
    controllable: None, tmp_path_factory: pytest.TempPathFactory, both_transports: None
) -> AsyncIterator[Gateway]:
    """Envoy, our picker and three model servers. Each test leaves them as they were."""
    async with running_gateway(tmp_path_factory.mktemp("own"), policy=CALM) as gateway:
        yield gateway


async def decided(gateway: Gateway, reply: Reply) -> list[str]:
    """Return the destinations that the picker named for the request of `reply`."""
    decision = await gateway.picker.decision(reply.headers["x-request-id"])
    assert decision is not None
    return list(decision["destinations"])


async def test_row_04_the_first_destination_serves(through: Gateway) -> None:
    """The data plane uses the metadata and the server sees the header: both hold the pick."""
    for n in range(4):
        reply = await through.client.complete(long(n))
        names = await decided(through, reply)
        served = through.backend_at(names[0])
        assert reply.served_by == served.name
        assert served.prompts[-1].headers[DESTINATION] == ",".join(names)


async def test_row_05_the_next_of_the_list_serves_when_the_first_is_dead(through: Gateway) -> None:
    """A server that died a moment ago is still named first. The second server serves its requests, and none
    fails.
    """
    first = through.backend_at((await decided(through, await through.client.complete(long("x"))))[0])
    await first.stop()
    try:
        replies = await asyncio.gather(*(through.client.complete(long("x")) for _ in range(12)))
        assert [r.status for r in replies] == [200] * 12
        assert first.name not in {r.served_by for r in replies}
        tried = [
            await decided(through, r) for r in replies if (await decided(through, r))[0] == str(first.address)
        ]
        assert tried, "the dead server was never named first"
        assert await through.picker.metric("epp_served_mismatch_total") >= len(tried)
    finally:
        await first.start()


async def test_row_07_envoy_tells_who_served_after_a_retry(through: Gateway) -> None:
    """Envoy itself tells the picker that another endpoint served, and the picker expects the prompt in the
    cache of that endpoint.
    """
    await through.picker.reads_bodies()
    first = through.backend_at((await decided(through, await through.client.complete(long("y"))))[0])
    first.behaviour.fail_next = 1
    reply = await through.client.complete(long("y"))
    assert (await decided(through, reply))[0] == str(first.address)
    assert reply.served_by != first.name
    decision = await through.picker.decision(reply.headers["x-request-id"])
    assert decision is not None
    assert through.backend_at(decision["served"]).name == reply.served_by
    again = await through.client.complete(long("y"))
    decision = await through.picker.decision(again.headers["x-request-id"])
    assert decision is not None
    matched = {candidate["name"]: candidate["matched_tokens"] for candidate in decision["candidates"]}
    assert matched[reply.served_by] > 0.8 * decision["prompt_tokens"], "only whole chunks match"


async def test_row_06_no_endpoint_is_503_and_recovers(through: Gateway) -> None:
    """Without endpoints the client gets 503 as JSON. Once they are back, it gets an answer."""
    backends = through.backends
    await through.set_backends([])

    async def refused() -> bool:
        return (await through.client.complete()).status == 503

    await wait_until(refused, what="an empty fleet is answered 503")
    for reply in (await through.client.complete(), await through.client.get("/v1/models")):
        assert reply.status == 503
        assert reply.json()["error"]["type"] == "service_unavailable"
    await through.set_backends(backends)

    async def served() -> bool:
        return (await through.client.complete()).status == 200

    await wait_until(served, what="the endpoints are back")


async def test_row_11_a_client_does_not_name_its_server(through: Gateway) -> None:
    """The header of a client does not decide, and no server ever sees the client's value."""
    for backend in through.backends:
        reply = await through.client.complete(headers={DESTINATION: str(backend.address)})
        names = await decided(through, reply)
        assert through.backend_at(names[0]).name == reply.served_by
        assert through.backend_at(names[0]).prompts[-1].headers[DESTINATION] == ",".join(names)


async def test_row_12_refusals_reach_the_client_as_json(through: Gateway) -> None:
    """Refusals of the picker and of Envoy have the shape that OpenAI's clients parse."""
    await through.picker.reads_bodies()
    bad = await through.client.request("POST", "/v1/chat/completions", body=b'{"model": "m"')
    large = await through.client.request("POST", "/v1/chat/completions", body=b" " * (33 * 2**20))
    for reply, status in ((bad, 400), (large, 413)):
        assert reply.status == status
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_row_13_requests_without_inference_are_served(through: Gateway) -> None:
    """Model lists, posts without a body and unknown paths reach a server by load."""
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", None),
        ("POST", "/v1/audio/speech", b"\x00\x01"),
        ("PUT", "/anything?at=all", b'{"json": true}'),
    ):
        reply = await through.client.request(method, path, body=body)
        assert reply.status == 200
        names = await decided(through, reply)
        assert reply.served_by == through.backend_at(names[0]).name


async def test_row_16_the_client_gets_the_request_id(through: Gateway) -> None:
    """The answer carries the caller's id, or the id that the picker made. The id names the decision."""
    kept = await through.client.complete(headers={"x-request-id": "caller-1"})
    assert kept.headers["x-request-id"] == "caller-1"
    assert await decided(through, kept)
    made = [await through.client.complete() for _ in range(2)]
    assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert await decided(through, made[0])


# -- with the picker away ------------------------------------------------------------------------------------


async def whole(gateway: Gateway, answers: list[OpenReply]) -> None:
    """Let the servers go on. Check that every answer arrives to its end."""
    for backend in gateway.backends:
        backend.behaviour.before_last.open()
    bodies = await asyncio.gather(*(a.rest() for a in answers))
    assert [body.endswith(b"[DONE]\n\n") for body in bodies] == [True] * STREAMS


async def test_row_14_a_killed_picker_cuts_no_answer_and_new_requests_fall_back(tmp_path: Path) -> None:
    """The picker is killed with SIGKILL: answers in flight complete, and new requests are spread over the
    servers.
    """
    async with (
        running_gateway(tmp_path, policy=CALM) as gateway,
        answers_in_flight(gateway, STREAMS) as answers,
    ):
        gateway.picker.process.kill()
        await gateway.picker.process.wait()
        await whole(gateway, answers)
        before = await gateway.envoy.bypassed()
        assert {(await gateway.client.complete(f"new {n}")).status for n in range(STREAMS)} == {200}
        assert await gateway.envoy.bypassed() == before + STREAMS


async def test_row_11_a_client_does_not_name_its_server_while_the_picker_is_down(tmp_path: Path) -> None:
    """Since no picker overwrites the header, the header must be removed before routing: the fallback policy
    spreads the requests.
    """
    async with running_gateway(tmp_path, policy=CALM) as gateway:
        gateway.picker.process.kill()
        await gateway.picker.process.wait()
        claim = {DESTINATION: str(gateway.backends[0].address)}
        replies = [await gateway.client.complete(headers=claim) for _ in range(6)]
        assert sorted(r.served_by for r in replies) == sorted(
            b.name for b in gateway.backends for _ in range(2)
        )
        assert not any(DESTINATION in r.headers for b in gateway.backends for r in b.prompts)


async def test_row_14_a_picker_that_stops_on_sigterm_cuts_no_answer(tmp_path: Path) -> None:
    """SIGTERM: the answers in flight complete, though the picker does not wait for their end."""
    async with (
        running_gateway(tmp_path, policy=CALM) as gateway,
        answers_in_flight(gateway, STREAMS) as answers,
    ):
        assert await gateway.picker.process.terminate() == 0
        assert gateway.held == STREAMS
        await whole(gateway, answers)
