"""The address that `epp record` reads: one reader at a time gets each request once."""

from __future__ import annotations

import pytest

from epp.base.errors import RecordingTakenError
from epp.observe.recording.lines import Opening, RecordedRequest, Servers, decode
from epp.observe.recording.tap import GONE_AFTER_S, Tap
from epp.picker.gate import Gate
from epp.protocol.asking import read_head, request_names
from tests.harness.clock import Clock
from tests.unit.picker.picker_questions import a_picker, ask, serve, text


def read_lines(tap: Tap, reader: str = "one") -> list[RecordedRequest]:
    opening, servers, *asked = [decode(row) for row in tap.read(reader, False)[0].splitlines()]
    assert isinstance(opening, Opening)
    assert isinstance(servers, Servers)
    return [line for line in asked if isinstance(line, RecordedRequest)]


def test_a_reader_gets_each_later_request_once() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    serve(picker, ask(text("before")), now=1.0)
    assert read_lines(tap) == []
    serve(picker, ask(text("one")), now=2.0)
    serve(picker, ask(text("two")), now=3.0)
    assert [line.prompt_bytes for line in read_lines(tap)] == [8000, 8000]
    assert read_lines(tap) == []
    with pytest.raises(RecordingTakenError):
        tap.read("another", False)


def test_a_reader_that_is_gone_makes_room_and_leaves_nothing_behind() -> None:
    picker, clock = a_picker(), Clock(100.0)
    tap = Tap(picker, clock=clock)
    read_lines(tap)
    clock.now += GONE_AFTER_S + 1
    assert tap.on
    serve(picker, ask(text("one")), now=2.0)
    assert not tap.on, "the next request notices that nobody asks any more"
    serve(picker, ask(text("two")), now=3.0)
    assert read_lines(tap, "another") == []
    serve(picker, ask(text("three")), now=4.0)
    assert len(read_lines(tap, "another")) == 1


def test_a_reader_that_ends_its_reading_makes_room_at_once() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    read_lines(tap)
    assert picker.recorders == 1
    serve(picker, ask(text("one")), now=2.0)
    assert len(tap.read("one", True)[0].splitlines()) == 3, (
        "the last request of the reader gets an answer too"
    )
    assert not tap.on
    assert picker.recorders == 0
    assert read_lines(tap, "another") == []


def test_a_recording_has_tenants_without_flow_control_too() -> None:
    picker = a_picker()
    gate, spec = Gate(picker), picker.policy.spec
    tenant = [(spec.flow.tenant_header, "acme")]
    assert picker.flow_read is None
    assert spec.flow.tenant_header not in request_names(spec, flow=picker.flow_read)
    tap = Tap(picker, clock=Clock(100.0))
    read_lines(tap)
    assert not gate.on, "flow control stays off"
    assert spec.flow.tenant_header in request_names(spec, flow=picker.flow_read)
    assert read_head(tenant, spec, flow=picker.flow_read).claim.tenant == "acme"
