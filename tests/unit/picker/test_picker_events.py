"""The events that the picker sends to its listeners: one for each thing that happens, in order."""

from __future__ import annotations

import pytest

from epp.base.types import ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.picker.decision import Question
from epp.picker.events import (
    Answered,
    Began,
    Ended,
    Moved,
    PickerEvent,
    Proved,
    Restarted,
    TimedEvent,
)
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import A, B, a_picker, endpoints


def heard_picker() -> tuple[Picker, list[PickerEvent]]:
    picker = a_picker(on=endpoints("ab"))
    events: list[PickerEvent] = []
    picker.subscribe(events.append)
    return picker, events


def a_request() -> Question:
    return Question(
        request_id="r", inference=InferenceRequest(kind=ApiKind.CHAT, prompt=b"x" * 1000, stream=True)
    )


def time_of(event: PickerEvent) -> float:
    assert isinstance(event, TimedEvent), "events of a stream have no time"
    return event.at


def test_a_request_sends_events_when_it_begins_moves_is_answered_and_ends() -> None:
    picker, events = heard_picker()
    pick = picker.pick(a_request(), now=1.0)
    elsewhere = B if pick.destinations[0] == A else A
    picker.on_response_headers(pick, status=200, served=elsewhere, now=2.0)
    picker.end(pick, outcome="ended", now=3.0)
    picker.end(pick, outcome="ended", now=4.0)
    assert [(type(event), time_of(event)) for event in events] == [
        (Began, 1.0),
        (Moved, 2.0),
        (Proved, 2.0),
        (Answered, 2.0),
        (Ended, 3.0),
    ]
    of_requests = [event for event in events if isinstance(event, Began | Moved | Answered | Ended)]
    assert {id(event.request) for event in of_requests} == {id(pick)}
    assert isinstance(events[3], Answered)
    assert events[3].mismatch


@pytest.mark.parametrize(("status", "fault"), [(200, False), (404, False), (429, True), (503, True)])
def test_a_fault_is_known_with_the_first_event_of_the_answer(status: int, fault: bool) -> None:  # noqa: FBT001 - a row
    picker, _ = heard_picker()
    failed: list[tuple[type[PickerEvent], bool]] = []

    def note(event: PickerEvent) -> None:
        if isinstance(event, Began | Moved | Answered):
            failed.append((type(event), event.request.failed))

    picker.subscribe(note)
    pick = picker.pick(a_request(), now=1.0)
    elsewhere = B if pick.destinations[0] == A else A
    picker.on_response_headers(pick, status=status, served=elsewhere, now=2.0)
    assert failed == [(Began, False), (Moved, fault), (Answered, fault)]


def test_a_request_that_is_let_go_ends_once() -> None:
    picker, events = heard_picker()
    pick = picker.pick(a_request(), now=1.0)
    picker.detach(pick, now=2.0)
    picker.end(pick, outcome="ended", now=3.0)
    assert [type(event) for event in events] == [Began, Ended]


def test_only_a_restart_seen_in_counters_sends_an_event() -> None:
    picker, events = heard_picker()
    name = EndpointName("a")
    picker.news.observe(name, EndpointMetrics(scraped_at=1.0, prompt_tokens=500.0, finished=5.0), now=1.0)
    picker.news.observe(name, EndpointMetrics(scraped_at=2.0, prompt_tokens=10.0, finished=0.0), now=2.0)
    assert [(type(event), time_of(event)) for event in events] == [(Restarted, 2.0)]
    state = picker.fleet.get(name)
    assert state is not None
    assert state.cold_at == 2.0
    picker.news.set_endpoints([Endpoint(name, A, incarnation="2")], now=3.0)
    assert len(events) == 1
    assert state.cold_at == 3.0
