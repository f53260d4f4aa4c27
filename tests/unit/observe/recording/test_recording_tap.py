"""What a recording keeps of a request, who gets its line, and how many lines wait."""

import random

import pytest

from epp.base.types import EndpointMetrics, EndpointName, unpack_hashes
from epp.config.policy import DEFAULT_POLICY
from epp.observe import recording as tapping
from epp.observe.recording import GONE_AFTER_S, Opening, RecordedRequest, Servers, Tap, decode, line_of
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import HashSecret
from epp.protocol.asking import read_head, request_names
from epp.request.response import ResponseFeedback
from tests.harness.clock import Clock
from tests.unit.picker.picker_questions import a_picker, ask, serve, text


class TapReader:
    """Reads as `epp record` does."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._following: int | None = None
        self.left_out = 0
        assert self.read() == []

    def read(self) -> list[RecordedRequest]:
        found = self._tap.read(self._following)
        self.left_out += found.left_out
        self._following = found.following
        opening, servers, *asked = [decode(row) for row in found.lines.splitlines()]
        assert isinstance(opening, Opening)
        assert isinstance(servers, Servers)
        return [line for line in asked if isinstance(line, RecordedRequest)]


def record_request(picker: Picker, prompt: bytes, *, salt: str = "", now: float) -> RecordedRequest:
    """Route one request and end it, with a sampled answer."""
    pick = picker.pick(ask(prompt, salt=salt, stream=True), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.1)
    feedback = ResponseFeedback(
        first_token_at=now + 0.3, prompt_tokens=2000, cached_tokens=7, completion_tokens=40
    )
    picker.on_feedback(pick, feedback, now=now + 1.5)
    picker.end(pick, outcome="ended", now=now + 1.5)
    return line_of(pick, unix_now_s=1000.0 + now + 1.5, key=b"k")


def test_each_reader_gets_each_later_request_once() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    serve(picker, ask(text("before")), now=1.0)
    one = TapReader(tap)
    serve(picker, ask(text("one")), now=2.0)
    other = TapReader(tap)
    serve(picker, ask(text("two")), now=3.0)
    assert [line.prompt_bytes for line in one.read()] == [8000, 8000]
    assert len(other.read()) == 1
    assert one.read() == other.read() == []


def test_a_recording_that_nobody_reads_ends_and_leaves_nothing_behind() -> None:
    picker, clock = a_picker(), Clock(100.0)
    tap = Tap(picker, clock=clock)
    reader = TapReader(tap)
    assert (tap.on, picker.recorders) == (True, 1)
    clock.now += GONE_AFTER_S + 1
    serve(picker, ask(text("one")), now=2.0)
    assert (tap.on, picker.recorders) == (False, 0)
    serve(picker, ask(text("two")), now=3.0)
    assert reader.read() == []
    serve(picker, ask(text("three")), now=4.0)
    assert len(reader.read()) == 1


def test_lines_beyond_the_bound_are_dropped_and_counted() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0), most_bytes=1500)
    reader = TapReader(tap)
    for n in range(9):
        serve(picker, ask(text(f"{n}", 256)), now=float(n))
    assert len(reader.read()) + reader.left_out == 9
    assert 0 < reader.left_out < 9
    serve(picker, ask(text("later", 256)), now=10.0)
    assert len(reader.read()) == 1


def test_a_number_of_an_earlier_process_gets_every_line() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    TapReader(tap)
    serve(picker, ask(text("one")), now=2.0)
    found = tap.read(500)
    assert (len(found.lines.splitlines()), found.left_out, found.following) == (3, 0, 2)


def test_a_line_has_the_size_server_and_outcome_of_its_request() -> None:
    picker = a_picker()
    first = record_request(picker, text("one"), now=10.0)
    second = record_request(picker, text("one") + text("more"), now=20.0)
    assert first.at_unix_s == 1010.0
    assert first.ended_s == pytest.approx(1.5)
    assert first.ttft_s == pytest.approx(0.3)
    assert (first.cached_tokens, first.output_tokens) == (7, 40)
    assert first.prompt_bytes == 8000
    assert (first.outcome, first.status, first.stream) == ("ended", 200, True)
    assert second.server == first.server, "the second prompt begins with the first"
    assert second.matched_tokens > 0
    assert unpack_hashes(second.chunks)[: len(unpack_hashes(first.chunks))] == unpack_hashes(first.chunks)


def test_a_tenant_is_a_hash_that_depends_on_the_key() -> None:
    def tenant(key: bytes, name: str) -> str:
        pick = a_picker().pick(ask(text("one")), now=1.0)
        pick.decision.tenant = name
        return line_of(pick, unix_now_s=1.0, key=key).tenant

    acme = tenant(b"k", "acme")
    assert len(acme) == 12
    assert acme == tenant(b"k", "acme")
    assert len({acme, tenant(b"k", "other"), tenant(b"other", "acme")}) == 3
    assert tenant(b"k", "") == ""
    assert tenant(b"k", "\udc80"), "a name that is not valid text is hashed too"


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    pick = a_picker().pick(ask(text("one")), now=1000.0)
    assert line_of(pick, unix_now_s=1.0, key=b"k").ended_s == 0.0


def test_the_opening_says_how_the_picker_cuts_and_routes() -> None:
    picker = a_picker()
    opening = tapping.opening_of(picker)
    assert opening.chunk_bytes == picker.caches.table.schedule.size_bytes
    assert opening.policy["spec"]["rule"] == picker.policy.spec.rule
    assert opening.hashing == tapping.opening_of(a_picker()).hashing
    other = Picker(DEFAULT_POLICY, rng=random.Random(1), secret=HashSecret(b"x" * 32))
    assert opening.hashing != tapping.opening_of(other).hashing, (
        "hashes under different secrets cannot be compared"
    )


def test_the_description_of_a_server_has_its_stated_capacity_or_none() -> None:
    picker = a_picker()
    page = EndpointMetrics(scraped_at=1.0, capacity_tokens=100_000, block_size=16)
    picker.news.observe(EndpointName("b"), page, now=1.0)
    found = {server.name: server for server in tapping.servers_of(picker).servers}
    assert list(found) == list("abcd")
    assert found["b"].capacity_tokens == 100_000
    assert found["a"].capacity_tokens is None


def test_a_recording_has_tenants_without_flow_control_too() -> None:
    picker = a_picker()
    gate, spec = Gate(picker), picker.policy.spec
    tenant = [(spec.flow.tenant_header, "acme")]
    assert picker.flow_read is None
    assert spec.flow.tenant_header not in request_names(spec, flow=picker.flow_read)
    TapReader(Tap(picker, clock=Clock(100.0)))
    assert not gate.on, "flow control stays off"
    assert spec.flow.tenant_header in request_names(spec, flow=picker.flow_read)
    assert read_head(tenant, spec, flow=picker.flow_read).claim.tenant == "acme"
