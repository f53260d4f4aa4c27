"""Each gateway with our picker, in processes of its own: what its clients see, and what the picker knows."""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from epp.base.types import PREFILLER, Address
from tests.dialects.setups import ADAPTER, ALIAS, Setup, running_setup
from tests.dialects.shapes import SHAPES, SUBSET_HEADER
from tests.harness import raw_http
from tests.harness.backend import Received
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

WORDS = "the fox and the hen went to see the old mill by the river "


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Setup]:
    async with running_setup(SHAPES[request.param], tmp_path_factory.mktemp(request.param)) as running:
        yield running


async def test_prompts_go_where_their_prefix_is_and_hits_are_as_predicted(setup: Setup) -> None:
    """The picker expects as many hits as servers with endless caches would have."""
    prompts = [f"prefix of user {n % 4}: {WORDS * 120} question {n}" for n in range(24)]
    predicted = total = 0
    for n, prompt in enumerate(prompts):
        if n % 12 == 0:
            await setup.picker.reads_bodies()
        reply = await setup.client.complete(prompt, headers={"x-request-id": f"hit-{n}"})
        assert reply.status == 200
        decision = await setup.decision(f"hit-{n}")
        assert (decision["kind"], decision["unread"]) == ("completions", "")
        predicted += decision["matched_tokens"]
        total += decision["prompt_tokens"]
    ideal = setup.ideal_hit_ratio("prefix of user")
    assert ideal > 0.7
    assert predicted / total == pytest.approx(ideal, abs=0.06)


async def test_a_chat_is_known_by_its_path_or_its_body(setup: Setup) -> None:
    await setup.picker.reads_bodies()
    body = {"model": "m", "messages": [{"role": "user", "content": WORDS * 60}]}
    reply = await setup.client.request(
        "POST",
        "/v1/chat/completions",
        body=json.dumps(body).encode(),
        headers={"content-type": "application/json", "x-request-id": "chat"},
    )
    assert reply.status == 200
    decision = await setup.decision("chat")
    assert (decision["kind"], decision["unread"]) == ("chat", "")


async def test_a_request_without_a_body_is_served(setup: Setup) -> None:
    reply = await setup.client.get("/v1/files")
    assert (reply.status, reply.served_by in ("s0", "s1", "s2")) == (200, True)


async def test_list_of_models_is_that_of_all_servers_where_the_gateway_shows_it(setup: Setup) -> None:
    reply = await setup.client.get("/v1/models")
    assert reply.status == 200
    if setup.shape.bare:
        assert reply.served_by, "one server answers with its own list"
    else:
        assert [card["id"] for card in reply.json()["data"]] == [ALIAS, "m", ADAPTER]


async def test_a_request_goes_to_the_server_that_lists_its_model(setup: Setup) -> None:
    for n in range(3):
        reply = await setup.client.complete(f"who has it {n}", model=ADAPTER)
        assert (reply.status, reply.served_by) == (200, "s2")


async def test_a_model_that_no_server_has_is_a_404_where_the_gateway_shows_it(setup: Setup) -> None:
    reply = await setup.client.complete("to whom", model="ghost")
    asked = [request for backend in setup.backends for request in backend.prompts if b"ghost" in request.body]
    if setup.shape.bare:
        assert (reply.status, len(asked)) == (200, 1), "the gateway goes on without the picker"
    else:
        assert (reply.status, reply.json()["error"]["code"], asked) == (404, "model_not_found", [])


async def test_alias_is_rewritten_in_the_body_where_the_gateway_takes_one_back(setup: Setup) -> None:
    reply = await setup.client.complete("by another name", model=ALIAS)
    assert reply.status == 200
    (body,) = [
        request.body
        for backend in setup.backends
        for request in backend.prompts
        if b"by another name" in request.body
    ]
    assert json.loads(body)["model"] == (ALIAS if setup.shape.bare else ADAPTER)
    if not setup.shape.bare:
        assert reply.served_by == "s2"


async def test_prefill_server_is_named_to_decode_server_and_no_client_names_one(setup: Setup) -> None:
    """The decode server is busy, so another server computes the prompt at a lower cost. The client's header
    never counts.
    """
    prefiller, decoder = setup.backends[:2]
    own = {PREFILLER: "203.0.113.9:80", "x-prefiller-url": "203.0.113.9:80"}

    def received(marker: str) -> Received:
        (found,) = [r for backend in setup.backends for r in backend.prompts if marker.encode() in r.body]
        return found

    decoder.metrics["vllm:num_requests_running"] = 8
    await setup.use((prefiller, decoder), roles={"s0": "prefill", "s1": "decode"})
    await setup.policy("apart", cost={"stalledRequestWeight": 5}, disaggregation={"minUncachedTokens": 64})
    try:
        await setup.until(lambda seen: any(each["running"] == 8 for each in seen), what="it is known as busy")
        await setup.picker.reads_bodies()
        reply = await setup.client.complete(f"computed elsewhere {WORDS * 200}", headers=own)
        assert (reply.status, reply.served_by) == (200, "s1")
        await setup.client.complete("too short to move", headers=own)
    finally:
        decoder.metrics["vllm:num_requests_running"] = 0
        await setup.use(setup.backends)
        await setup.policy("test")
    named = received("computed elsewhere").headers
    alone = received("too short to move").headers
    if setup.shape.bare:
        assert named.get(PREFILLER) == own[PREFILLER], (
            "this gateway changes no header: the route has to remove it"
        )
        return
    assert named.get(PREFILLER) == str(prefiller.address)
    assert "x-prefiller-url" not in named
    assert PREFILLER not in alone
    assert "x-prefiller-url" not in alone


async def test_the_picker_names_as_many_servers_as_the_gateway_reads(setup: Setup) -> None:
    await setup.client.complete("how many", headers={"x-request-id": "many"})
    named = (await setup.decision("many"))["destinations"]
    assert len(named) == (3 if setup.shape.reads_list else 1)


async def test_dead_first_choice_is_passed_over_at_once_or_after_failed_scrapes(setup: Setup) -> None:
    """A gateway that reads a list turns to the next endpoint. A gateway that reads one address fails until
    the picker knows that the server is dead.
    """
    prompt = f"who dies {WORDS * 120}"
    await setup.picker.reads_bodies()
    dead = setup.backend((await setup.client.complete(prompt)).served_by)
    await dead.stop()
    try:
        if setup.shape.reads_list:
            reply = await setup.client.complete(prompt)
            assert (reply.status, reply.served_by != dead.name) == (200, True)
        else:
            assert (await setup.client.complete(prompt)).status in (502, 503)

            async def served() -> bool:
                return (await setup.client.complete(prompt)).status == 200

            await wait_until(served, what="the picker leaves the dead server out")
    finally:
        await dead.start()
    await setup.until(lambda seen: all(each["ready"] for each in seen), what="the server is back")


async def test_a_fleet_without_endpoints_is_a_503_where_the_gateway_shows_it(setup: Setup) -> None:
    await setup.use(())
    try:
        reply = await setup.client.complete("to nobody")
    finally:
        await setup.use(setup.backends)
    if setup.shape.shows_refusals:
        assert (reply.status, reply.json()["error"]["code"]) == (503, "no_ready_endpoint")
    else:
        assert reply.status == 200, "the gateway goes on without the picker"


async def test_a_full_fleet_is_a_429_where_the_gateway_shows_it(setup: Setup) -> None:
    for backend in setup.backends:
        backend.metrics["vllm:num_requests_waiting"] = 9
    await setup.policy("full", load={"maxWaiting": 3, "whenSaturated": "Reject", "retryAfterSeconds": 7})
    try:
        await setup.until(lambda seen: all(each["waiting"] == 9 for each in seen), what="all have a queue")
        await setup.picker.reads_bodies()
        reply = await setup.client.complete("too much")
    finally:
        for backend in setup.backends:
            backend.metrics["vllm:num_requests_waiting"] = 0
        await setup.policy("test")
    if setup.shape.shows_refusals:
        assert (reply.status, reply.json()["error"]["code"]) == (429, "saturated")
        assert reply.headers["retry-after"] == "7"
    else:
        assert reply.status == 200, "the gateway goes on without the picker"


async def test_a_stream_of_a_thousand_chunks_arrives_whole_and_in_order(setup: Setup) -> None:
    for backend in setup.backends:
        backend.behaviour.chunks = 1000
    try:
        async with setup.client.stream("a thousand", headers={"x-request-id": "thousand"}) as answer:
            body = await answer.rest()
    finally:
        for backend in setup.backends:
            backend.behaviour.chunks = 1
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in body.split(b"\n\n")[:-2]]
    assert texts == [f"{answer.served_by}-{n} " for n in range(1000)]
    await setup.decision("thousand", outcome="detached" if setup.shape.abort_is == "detached" else "ended")


async def test_a_client_that_goes_leaves_no_load_behind(setup: Setup) -> None:
    for backend in setup.backends:
        backend.behaviour.before_last.shut()
        backend.behaviour.chunks = 3
    try:
        async with setup.client.stream("going", headers={"x-request-id": "going"}) as answer:
            server = setup.backend(answer.served_by)
            await server.behaviour.before_last.wait_waiting(1)
            await answer.piece()
            answer.abort()
            await server.behaviour.before_last.wait_waiting(0)
    finally:
        for backend in setup.backends:
            backend.behaviour.before_last.open()
            backend.behaviour.chunks = 1
    await setup.decision("going", outcome=setup.shape.abort_is)
    await setup.until(lambda seen: not any(each["in_flight"] for each in seen), what="none is in flight")


async def test_a_body_that_ends_in_trailers_is_read_and_passed_on(setup: Setup) -> None:
    body = json.dumps({"model": "m", "prompt": f"trailing {WORDS * 20}"}).encode()
    sent = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: trailing\r\n"
        b"connection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
        + b"%x\r\n%s\r\n0\r\nx-sum: 1\r\n\r\n"
        % (len(body), body)
    )
    await setup.picker.reads_bodies()
    reply = await raw_http.send_raw(Address.parse(setup.client.url.removeprefix("http://")), sent)
    assert reply.status == 200
    decision = await setup.decision("trailing")
    assert (decision["kind"], decision["unread"]) == ("completions", "")
    assert any(received.body == body for backend in setup.backends for received in backend.prompts)


async def test_the_subset_hint_binds_where_the_gateway_sends_one(setup: Setup) -> None:
    if not setup.shape.subset:
        pytest.skip("this gateway sends no subset hint")
    only = setup.backends[2]
    for n in range(3):
        reply = await setup.client.complete(f"subset {n}", headers={SUBSET_HEADER: str(only.address)})
        assert (reply.status, reply.served_by) == (200, only.name)
    reply = await setup.client.complete("subset", headers={SUBSET_HEADER: "203.0.113.1:80"})
    assert reply.status == 503


async def test_picker_knows_the_server_that_served_where_the_gateway_tells_it(setup: Setup) -> None:
    reply = await setup.client.complete("who was it", headers={"x-request-id": "who"})
    decision = await setup.decision("who")
    if setup.shape.names_served:
        assert decision["served"] == str(setup.backend(reply.served_by).address)
    else:
        assert decision["served"] is None


async def test_gateway_fails_open_or_closed_without_picker_and_finds_it_again(setup: Setup) -> None:
    """If answers do not pass the picker, they go on, and new requests are served too. If they pass the
    picker, the gateway fails closed.
    """
    for backend in setup.backends:
        backend.behaviour.before_last.shut()
        backend.behaviour.chunks = 3
    fails = (aiohttp.ClientError, asyncio.IncompleteReadError)
    async with setup.client.stream("while it dies") as answer:
        await answer.piece()
        setup.picker.process.kill()
        for backend in setup.backends:
            backend.behaviour.before_last.open()
            backend.behaviour.chunks = 1
        if setup.shape.duplex:
            with pytest.raises(fails):
                await answer.rest()
        else:
            assert (await answer.rest()).endswith(b"[DONE]\n\n")
    reply = await setup.client.complete("while it is dead")
    assert reply.status >= 500 if setup.shape.duplex else reply.status == 200
    await setup.restart_picker()
    assert (await setup.client.complete("after")).status == 200
