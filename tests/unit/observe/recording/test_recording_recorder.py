"""What the recorder notes of a request, and how many lines it keeps."""

from __future__ import annotations

import pytest

from epp.observe.recording.lines import RecordedRequest, unpacked
from epp.observe.recording.tap import Recorder
from tests.unit.observe.recording.recorded import record_request
from tests.unit.picker.picker_questions import a_picker, ask, text


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
