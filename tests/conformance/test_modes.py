"""Rows 1, 2, 15 and 17: how the picker speaks ext_proc in each mode in which a data plane hands over a
request.
"""

from __future__ import annotations

import json
from itertools import pairwise

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, MAX_PIECE_BYTES, Mode
from tests.conformance.modes import DUPLEX_REQUEST, EARLY, MODES, READING_MODES, SILENT_DUPLEX, STREAMED
from tests.conformance.picker import PickerUnderTest, completion

pytestmark = pytest.mark.asyncio(loop_scope="module")

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
reading_mode = pytest.mark.parametrize("mode", READING_MODES.values(), ids=READING_MODES)
duplex_mode = pytest.mark.parametrize(
    "mode", [DUPLEX, DUPLEX_REQUEST, SILENT_DUPLEX], ids=["both", "request", "silent"]
)


def in_pieces(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


@every_mode
async def test_row_01_a_request_is_routed_and_its_stream_ends_well(
    picker: PickerUnderTest, mode: Mode
) -> None:
    """The request gets an endpoint and the gRPC stream ends with OK in every body mode of the data plane."""
    routed = await picker.route(mode, completion())
    assert set(routed.destinations) <= set(picker.endpoints)
    assert routed.response.values(":status") == ["200"]


@every_mode
async def test_row_01_a_request_without_a_body_is_routed(picker: PickerUnderTest, mode: Mode) -> None:
    """Headers that end the request are the whole request: the pick is in the answer to them."""
    routed = await picker.route(mode, None, method="GET", path="/v1/models")
    assert set(routed.destinations) <= set(picker.endpoints)
    assert routed.request.order == ["headers"]


@reading_mode
async def test_row_01_a_body_of_many_pieces_is_routed(picker: PickerUnderTest, mode: Mode) -> None:
    """The network may cut a body anywhere. Every piece gets the answer that its mode asks for."""
    body = completion("many pieces " * 400)
    routed = await picker.route(mode, in_pieces(body, 700))
    assert set(routed.destinations) <= set(picker.endpoints)


async def test_row_01_a_client_that_goes_away_in_mid_request_harms_no_other(picker: PickerUnderTest) -> None:
    """A stream that is cancelled before the body, or before the answer, ends alone."""
    for mode in MODES.values():
        async with picker.exchange(mode) as exchange:
            await exchange.send(completion("gone before the answer"))
        async with picker.exchange(mode) as exchange:
            await exchange.begin()
    assert (await picker.route(BUFFERED, completion("still here"))).destinations


@duplex_mode
@pytest.mark.parametrize("trailers", [False, True], ids=["plain", "trailers"])
async def test_row_02_answers_come_as_headers_then_body_then_trailers(
    picker: PickerUnderTest, mode: Mode, *, trailers: bool
) -> None:
    """In full duplex the data plane takes the answers in the order of the request's parts. Each part comes
    once, except the body.
    """
    pieces = in_pieces(completion("in order " * 2000), 5000)
    async with picker.exchange(mode) as exchange:
        await exchange.send(pieces, trailers=trailers)
        order = [part for part, after in pairwise([*exchange.request.order, ""]) if part != after]
        assert order == ["headers", "body", *(["trailers"] if trailers else [])]
        assert exchange.request.order.count("headers") == 1
        assert exchange.destinations


@duplex_mode
@pytest.mark.parametrize("size", [1, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, 400_000])
async def test_row_02_the_body_comes_back_byte_for_byte_in_pieces_that_fit(
    picker: PickerUnderTest, mode: Mode, size: int
) -> None:
    """The data plane keeps no copy, so the picker returns every byte, at most 62,000 in a message, and marks
    the end once.
    """
    start, end = b'{"model": "m", "prompt": "', b'"}'
    body = b"7" if size == 1 else start + b"x" * (size - len(start) - len(end)) + end
    path = "/anything" if size == 1 else "/v1/completions"
    assert len(body) == size
    async with picker.exchange(mode) as exchange:
        await exchange.send(in_pieces(body, 16_384), path=path)
        half = exchange.request
        assert half.body == body
        assert max(map(len, half.pieces)) <= MAX_PIECE_BYTES
        assert half.ends == [False] * (len(half.ends) - 1) + [True]


@duplex_mode
async def test_row_02_before_trailers_no_body_piece_ends_the_stream(
    picker: PickerUnderTest, mode: Mode
) -> None:
    """A body that trailers follow does not end the request. The trailers do."""
    body = completion("trailers follow " * 5000)
    async with picker.exchange(mode) as exchange:
        await exchange.send(in_pieces(body, 9_000), trailers=True)
        assert exchange.request.body == body
        assert not any(exchange.request.ends)


@pytest.mark.parametrize("mode", [DUPLEX, SILENT_DUPLEX], ids=["told", "silent"])
@pytest.mark.parametrize("trailers", [False, True], ids=["plain", "trailers"])
async def test_row_02_the_answer_passes_through_unchanged(
    picker: PickerUnderTest, mode: Mode, *, trailers: bool
) -> None:
    """Full duplex of the response: the server's answer comes back whole, in order, whatever its bytes are."""
    answer = [bytes([n % 256]) * (n * 997 % 70_000) for n in range(1, 9)]
    async with picker.exchange(mode) as exchange:
        await exchange.send(completion())
        await exchange.respond(answer, trailers=trailers)
        half = exchange.response
        unchanged = half.body == b"".join(
            answer
        )  # The test compares them separately: pytest needs two minutes to explain a difference of 250 KB
        assert unchanged
        assert max(map(len, half.pieces)) <= MAX_PIECE_BYTES
        assert any(half.ends) is not trailers
        assert half.order[0] == "headers"
        assert await exchange.finish() is grpc.StatusCode.OK


async def test_row_02_a_streamed_answer_passes_piece_by_piece(picker: PickerUnderTest) -> None:
    """No piece of an answer waits for the next one: each comes back before another is sent."""
    async with picker.exchange(STREAMED) as exchange:
        await exchange.send(completion())
        await exchange.respond([b"data: %d\n\n" % n for n in range(5)])
        assert exchange.response.order == ["headers", *["body"] * 5]
        assert await exchange.finish() is grpc.StatusCode.OK


@pytest.mark.parametrize("plain_values", [False, True], ids=["raw_value", "value"])
async def test_row_15_names_in_any_case_and_either_kind_of_value(
    picker: PickerUnderTest, *, plain_values: bool
) -> None:
    """A header is the same in any case, and its value may be in `value` or `raw_value`:
    both hold what a client sent."""
    routed = await picker.route(
        BUFFERED,
        completion(),
        headers=[("X-REQUEST-ID", "Any-Case"), ("X-Gateway-Destination-Endpoint", "203.0.113.1:1")],
        plain_values=plain_values,
    )
    assert set(routed.destinations) <= set(picker.endpoints)
    assert routed.request.values("x-request-id") == ["Any-Case"]


@every_mode
async def test_row_15_a_name_that_comes_twice_is_no_error(picker: PickerUnderTest, mode: Mode) -> None:
    """Requests and responses may repeat any header. All its values pass, and the request is routed."""
    twice = [("accept", "a"), ("accept", "b"), ("set-cookie", "c"), ("Set-Cookie", "d")]
    async with picker.exchange(mode) as exchange:
        await exchange.send(completion(), headers=twice)
        await exchange.respond(b"{}", headers=twice)
        for half in (exchange.request, exchange.response):
            assert half.values("accept") == ["a", "b"]
            assert half.values("set-cookie") == ["c", "d"]
        assert exchange.destinations


async def test_row_15_bytes_that_are_no_text_are_no_error(picker: PickerUnderTest) -> None:
    """Header values are bytes. Bytes outside ASCII and UTF-8 neither end the stream nor change on the way."""
    odd = [("x-odd", "\xff\x80\xc3"), ("x-request-id", "\xe9t\xe9")]
    routed = await picker.route(BUFFERED, completion(), headers=odd)
    assert routed.destinations
    assert routed.request.values("x-odd") == ["\xff\x80\xc3"]


class Pinned:
    """Prompts that the subset hint sent to one endpoint each, so that only reading a prompt tells its
    endpoint.
    """

    def __init__(self) -> None:
        self.home: dict[str, bytes] = {}
        self._picker: PickerUnderTest | None = None
        """The picker that received the prompts: another transport means another picker."""

    async def fill(self, picker: PickerUnderTest) -> dict[str, bytes]:
        if picker is not self._picker:
            self._picker, self.home = picker, {}
            for n, endpoint in enumerate(picker.endpoints):
                sentence = f"Prompt {n} \N{SNOWMAN} of a conversation that {endpoint} holds. "
                body = json.dumps({"model": "m", "prompt": sentence * 60}, ensure_ascii=False).encode()
                await picker.route(BUFFERED, body, subset=[endpoint])
                self.home[endpoint] = body
        return self.home


@pytest.fixture(scope="module")
def pinned(picker: PickerUnderTest) -> Pinned:
    """Return the pinned prompts of each picker: another picker has other endpoints."""
    return Pinned()


@pytest.mark.parametrize(
    "mode", [EARLY, DUPLEX, DUPLEX_REQUEST], ids=["streamed_early", "full_duplex", "request"]
)
@given(cuts=st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=6), which=st.integers(0))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_row_17_any_cut_of_the_same_bytes_gives_the_same_pick(
    picker: PickerUnderTest, pinned: Pinned, mode: Mode, cuts: list[float], which: int
) -> None:
    """The places where the network cuts a body do not matter: a prompt goes to the endpoint that holds its
    prefix, in one piece or in many, also with a cut inside a character.
    """
    homes = list((await pinned.fill(picker)).items())
    home, body = homes[which % len(homes)]
    at = sorted({int(cut * len(body)) for cut in cuts} - {0})
    pieces = [body[start:end] for start, end in pairwise([0, *at, len(body)])]
    routed = await picker.route(mode, pieces)
    assert routed.destinations[0] == home
    assert routed.metadata_destination == routed.destination


@reading_mode
async def test_row_17_every_body_mode_finds_the_same_endpoint(
    picker: PickerUnderTest, pinned: Pinned, mode: Mode
) -> None:
    """The data plane chooses the mode: the same prompt goes to the same endpoint in every mode."""
    for home, body in (await pinned.fill(picker)).items():
        routed = await picker.route(mode, body)
        assert routed.destinations[0] == home
