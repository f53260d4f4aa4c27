"""Rows 6, 12 and 13: which requests the picker answers itself, and which it lets pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, Immediate, Mode
from tests.conformance.modes import MODES, READING_MODES
from tests.conformance.picker import CALM, PickerUnderTest, own_picker
from tests.harness.backend import running_backends
from tests.harness.processes import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
reading_mode = pytest.mark.parametrize("mode", READING_MODES.values(), ids=READING_MODES)
BODY = json.dumps({"model": "m", "prompt": "hello"}).encode()
CHAT = "/v1/chat/completions"

MALFORMED: dict[str, tuple[str, bytes]] = {
    "not JSON": (CHAT, b"hello"),
    "JSON cut off": (CHAT, b'{"model": "m", "messages": [{"role"'),
    "no object": (CHAT, b'["model", "m"]'),
    "no model in a chat": (CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}'),
    "no messages": (CHAT, b'{"model": "m"}'),
    "messages of a wrong type": (CHAT, b'{"model": "m", "messages": "hi"}'),
    "no model in a completion": ("/v1/completions", b'{"prompt": "hi"}'),
    "model of a wrong type": ("/v1/completions", b'{"model": {"name": "m"}, "prompt": "hi"}'),
}
PASSED: dict[str, tuple[str, str, bytes | None]] = {
    "unknown fields": (
        "POST",
        CHAT,
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "new": {}}',
    ),
    "JSON on an unknown path": ("POST", "/v2/tomorrow", b'{"anything": [1, 2, 3]}'),
    "no JSON on an unknown path": ("POST", "/upload", b"\x00\xff\x00"),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "empty POST": ("POST", CHAT, None),
    "empty body": ("POST", CHAT, b""),
    "another method": ("DELETE", "/v1/responses/1", None),
}


def check_error(refused: Immediate, *, status: int) -> dict[str, Any]:
    """Check for OpenAI's shape: an `error` object with a message for people and a type for programs."""
    assert refused.status == status
    assert refused.headers.get("content-type", "").startswith("application/json")
    error: dict[str, Any] = json.loads(refused.body)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


@reading_mode
@pytest.mark.parametrize("case", MALFORMED)
async def test_row_12_a_request_that_no_server_could_take_is_400(
    picker: PickerUnderTest, mode: Mode, case: str
) -> None:
    """The JSON is bad, or the model or the messages are missing: the client gets the error at once, in the
    shape that its library parses.
    """
    path, body = MALFORMED[case]
    async with picker.exchange(mode) as exchange:
        await exchange.send([body[:5], body[5:]], path=path)
        assert check_error(exchange.refused, status=400)["type"] == "invalid_request_error"


@reading_mode
async def test_row_12_a_body_over_the_limit_is_413(
    flagged: PickerUnderTest, mode: Mode, controllable: None
) -> None:
    """The picker sets the limit, and its error says that the body is too large."""
    async with flagged.exchange(mode) as exchange:
        await exchange.send([b" " * 700_000] * 50, headers=[("content-length", "35000000")])
        check_error(exchange.refused, status=413)


@reading_mode
@pytest.mark.parametrize("case", PASSED)
async def test_row_13_requests_that_are_not_understood_are_routed(
    picker: PickerUnderTest, mode: Mode, case: str
) -> None:
    """The picker does not judge requests of APIs that it does not know. It chooses a server by load and
    changes nothing.
    """
    method, path, body = PASSED[case]
    routed = await picker.route(mode, body, method=method, path=path)
    assert set(routed.destinations) <= set(picker.endpoints)
    if mode.duplex and body is not None:
        assert routed.request.body == body


async def test_row_13_a_query_and_a_prefix_of_the_path_do_no_harm(picker: PickerUnderTest) -> None:
    """Gateways put prefixes before paths and clients put queries behind them."""
    for path in ("/tenant-7/v1/completions?x=1", "/v1/completions/", "*", ""):
        assert (await picker.route(BUFFERED, BODY, path=path)).destinations


@pytest.mark.usefixtures("controllable")
async def test_row_06_no_endpoint_at_all_is_503(tmp_path: Path) -> None:
    """Without any endpoint every request, with or without a body, gets 503. Once there are endpoints, none
    does.
    """
    async with running_backends(2) as backends, own_picker(tmp_path, backends=[]) as picker:
        for mode in MODES.values():
            for body in (BODY, None):
                async with picker.exchange(mode) as exchange:
                    await exchange.send(body)
                    assert check_error(exchange.refused, status=503)["type"] == "service_unavailable"
        await picker.set_backends(backends)
        assert len((await picker.route(BUFFERED, BODY)).destinations) == 2
        await picker.set_backends([])
        async with picker.exchange() as exchange:
            await exchange.send(BODY)
            check_error(exchange.refused, status=503)


@pytest.mark.usefixtures("controllable")
async def test_row_06_shedding_is_429_with_a_time_to_come_back(tmp_path: Path) -> None:
    """If the policy refuses requests instead of queueing them, a saturated fleet answers 429 and says when to
    try again.
    """
    load = {"maxWaiting": 3, "whenSaturated": "Reject", "retryAfterSeconds": 7}
    scrape = {**CALM["scrape"], "intervalSeconds": 0.1}
    async with (
        running_backends(2) as backends,
        own_picker(tmp_path, backends=backends, policy={**CALM, "load": load, "scrape": scrape}) as picker,
    ):
        for backend in backends:
            backend.metrics["vllm:num_requests_waiting"] = 4
        for backend in backends:
            await picker.wait_endpoint(str(backend.address), waiting=4)
        for mode in MODES.values():
            for body in (BODY, None):
                async with picker.exchange(mode) as exchange:
                    await exchange.send(body)
                    assert check_error(exchange.refused, status=429)["type"] == "rate_limit_exceeded"
                    assert exchange.refused.headers["retry-after"] == "7"
        backends[0].metrics["vllm:num_requests_waiting"] = 3
        await picker.wait_endpoint(str(backends[0].address), waiting=3)
        assert (await picker.route(DUPLEX, BODY)).destinations[0] == str(backends[0].address)
        assert (await picker.running.metric("epp_refused_total", reason="saturated")) == 2 * len(MODES)


@pytest.mark.usefixtures("controllable")
async def test_row_06_an_endpoint_that_stops_answering_scrapes_is_not_picked(tmp_path: Path) -> None:
    """A ready server answers scrapes: a server whose metrics fail is not picked any more, and is picked again
    once they work.
    """
    policy = {"sampling": {"share": 0}, "scrape": {"failuresToEject": 2, "intervalSeconds": 0.1}}
    async with (
        running_backends(2) as backends,
        own_picker(tmp_path, backends=backends, policy=policy) as picker,
    ):
        sick, well = backends
        sick.metrics_page = "error"
        await picker.wait_endpoint(str(sick.address), ready=False)
        assert (await picker.route(BUFFERED, BODY)).destinations == [str(well.address)]
        async with picker.exchange() as exchange:
            await exchange.send(None, subset=[str(sick.address)])
            check_error(exchange.refused, status=503)
        sick.metrics_page = "normal"
        await picker.wait_endpoint(str(sick.address), ready=True)

        async def both() -> bool:
            return len((await picker.route(BUFFERED, BODY)).destinations) == 2

        await wait_until(both, what="both endpoints are picked again")
