"""What the recorder notes of a request, how many lines it keeps, and the lines about policy and servers."""

from __future__ import annotations

import random

import pytest

from epp.base.types import EndpointMetrics, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.observe.recording import tap
from epp.observe.recording.lines import RecordedRequest, unpacked
from epp.observe.recording.tap import Recorder
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import HashSecret
from epp.request.response import ResponseFeedback
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, text


def record_request(picker: Picker, recorder: Recorder, prompt: bytes, *, salt: str = "", now: float) -> None:
    """Route one request and end it, with a sampled answer."""
    pick = picker.pick(ask(prompt, salt=salt, stream=True), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.1)
    told = ResponseFeedback(
        first_token_at=now + 0.3, prompt_tokens=2000, cached_tokens=7, completion_tokens=40
    )
    picker.on_feedback(pick, told, now=now + 1.5)
    picker.end(pick, outcome="ended", now=now + 1.5)
    recorder.ended(pick, unix_now_s=1000.0 + now + 1.5)


def test_a_line_has_the_size_server_and_outcome_of_its_request() -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    record_request(picker, recorder, text("one"), now=10.0)
    record_request(picker, recorder, text("one") + text("more"), now=20.0)
    recorder.check_integrity()
    first, second = recorder.take()
    assert first.at_unix_s == 1010.0
    assert first.ended_s == pytest.approx(1.5)
    assert first.ttft_s == pytest.approx(0.3)
    assert (first.cached_tokens, first.output_tokens) == (7, 40)
    assert first.prompt_bytes == 8000
    assert (first.outcome, first.status, first.stream) == ("ended", 200, True)
    assert second.server == first.server, "the second prompt begins with the first"
    assert second.matched_tokens > 0
    assert unpacked(second.chunks)[: len(unpacked(first.chunks))] == unpacked(first.chunks)
    assert recorder.take() == []


def test_lines_beyond_the_bound_are_dropped_and_counted() -> None:
    picker, recorder = a_picker(), Recorder(key=b"k", most_waiting_bytes=2000)
    for n in range(5):
        record_request(picker, recorder, text(f"{n}", 256), now=float(n))
    recorder.check_integrity()
    assert len(recorder.take()) == 3
    assert recorder.dropped == 2
    record_request(picker, recorder, text("later", 256), now=9.0)
    assert len(recorder.take()) == 1, "there is room again once the lines were taken"


def test_a_tenant_is_a_hash_that_depends_on_the_key() -> None:
    def line(key: bytes, tenant: str) -> RecordedRequest:
        picker, recorder = a_picker(), Recorder(key=key)
        pick = picker.pick(ask(text("one")), now=1.0)
        pick.decision.tenant = tenant
        recorder.ended(pick, unix_now_s=1.0)
        (line,) = recorder.take()
        return line

    acme = line(b"k", "acme").tenant
    assert len(acme) == 12
    assert acme == line(b"k", "acme").tenant
    assert len({acme, line(b"k", "other").tenant, line(b"other", "acme").tenant}) == 3
    assert line(b"k", "").tenant == ""
    assert line(b"k", "\udc80").tenant, "a name that is not valid text is hashed too"


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    pick = picker.pick(ask(text("one")), now=1000.0)
    recorder.ended(pick, unix_now_s=1.0)
    (line,) = recorder.take()
    assert line.ended_s == 0.0


def test_the_opening_says_how_the_picker_cuts_and_routes() -> None:
    picker = a_picker()
    opening = tap.opening_of(picker)
    assert opening.chunk_bytes == picker.table.schedule.chunk_bytes
    assert opening.policy["spec"]["rule"] == picker.policy.spec.rule
    assert opening.hashing == tap.opening_of(a_picker()).hashing
    other = Picker(DEFAULT_POLICY, rng=random.Random(1), secret=HashSecret(b"x" * 32))
    assert opening.hashing != tap.opening_of(other).hashing, (
        "hashes under different secrets cannot be compared"
    )


def test_the_description_of_a_server_has_its_stated_capacity_or_none() -> None:
    picker = a_picker()
    page = EndpointMetrics(scraped_at=1.0, capacity_tokens=100_000, block_size=16)
    picker.observe(EndpointName("b"), page, now=1.0)
    found = {server.name: server for server in tap.servers_of(picker).servers}
    assert list(found) == list("abcd")
    assert found["b"].capacity_tokens == 100_000
    assert found["a"].capacity_tokens is None


@pytest.mark.parametrize(("key", "same"), [(b"x" * 32, True), (b"", False)])
def test_recorders_of_a_picker_with_a_secret_give_a_tenant_the_same_hash(*, key: bytes, same: bool) -> None:
    """Without a secret each recorder has a random key, so that nobody can guess names of tenants."""
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1), secret=HashSecret(key))
    picker.set_endpoints(endpoints("a"), now=0.0)

    def tenant_of() -> str:
        recorder = tap.recorder_of(picker)
        pick = picker.pick(ask(text("one")), now=1.0)
        pick.decision.tenant = "acme"
        recorder.ended(pick, unix_now_s=1.0)
        return recorder.take()[0].tenant

    assert (tenant_of() == tenant_of()) is same
