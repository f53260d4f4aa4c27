"""Rows 1, 2 and 4 over gRPC, on both transports: each way of sending bodies gets answers that a data plane
can carry out. The rows' other proofs are tests of the state machine, and of real gateways (`tests/dialects`).
"""

import json

import grpc
import pytest

from tests.conformance.picker import BODY, OwnPicker
from tests.harness.data_plane import MODES

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = json.dumps({"model": "m", "prompt": "back again " * 30_000}).encode()
ANSWER = [b'data: {"choices": [{"text": "%d"}]}\n\n' % n for n in range(1000)]


@pytest.mark.parametrize("name", MODES)
async def test_each_body_mode_is_served_whole_on_both_transports(picker: OwnPicker, name: str) -> None:
    mode = MODES[name]
    pieces = [LONG[start : start + 50_000] for start in range(0, len(LONG), 50_000)]
    for body, method, trailers in (
        (pieces, "POST", False),
        (BODY, "POST", mode.duplex),
        (None, "GET", False),
    ):
        async with picker.exchange(mode) as exchange:
            await exchange.send(body, method=method, trailers=trailers)
            assert set(exchange.destinations) <= set(picker.endpoints)
            assert exchange.metadata_destination == exchange.destination
            if mode.duplex and body is not None:
                assert exchange.request.body == b"".join([body] if isinstance(body, bytes) else body)
            if trailers:
                assert exchange.request.order[-1] == "trailers"
            await exchange.respond(ANSWER if mode.response else None)
            if mode.duplex and mode.response:
                assert exchange.response.body == b"".join(ANSWER)
            assert await exchange.finish() is grpc.StatusCode.OK
