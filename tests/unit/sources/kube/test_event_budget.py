"""Which Events are written, and how often at most."""

from __future__ import annotations

from epp.sources.kube.event_budget import EndpointChanges, EventBudget, EventText

NOBODY = EventText("NoEndpoints", "none")


def test_a_repeated_text_raises_the_count_of_one_event() -> None:
    event_budget = EventBudget()
    first = event_budget.offer(NOBODY, now=0.0, time_text="T0")
    second = event_budget.offer(NOBODY, now=30.0, time_text="T1")
    assert first is second
    assert second is not None
    assert (second.count, second.first_time) == (2, "T0")
    event_budget.check_integrity()


def test_after_ten_minutes_a_repeated_text_is_a_new_event() -> None:
    event_budget = EventBudget()
    first = event_budget.offer(NOBODY, now=0.0, time_text="T0")
    again = event_budget.offer(NOBODY, now=601.0, time_text="T1")
    assert first is not None
    assert again is not None
    assert (again.count, again.name != first.name) == (1, True)


def test_ten_of_a_hundred_events_at_once_are_written() -> None:
    event_budget = EventBudget()
    offered = [
        event_budget.offer(EventText("EndpointEjected", f"{n}"), now=0.0, time_text="T") for n in range(100)
    ]
    assert sum(event is not None for event in offered) == 10
    assert event_budget.offer(NOBODY, now=16.0, time_text="T") is not None, "the bucket fills again"
    event_budget.check_integrity()


def test_the_number_of_remembered_events_is_bounded() -> None:
    event_budget = EventBudget()
    for n in range(200):
        event_budget.offer(EventText("EndpointEjected", f"{n}"), now=n * 20.0, time_text="T")
        event_budget.check_integrity()


def test_an_event_that_could_not_be_written_is_new_the_next_time() -> None:
    event_budget = EventBudget()
    first = event_budget.offer(NOBODY, now=0.0, time_text="T0")
    assert first is not None
    event_budget.forget(first)
    again = event_budget.offer(NOBODY, now=1.0, time_text="T1")
    assert again is not None
    assert again.count == 1


def test_a_message_is_cut_to_the_1000_characters_of_an_event() -> None:
    event = EventBudget().offer(EventText("PolicyRefused", "x" * 5000), now=0.0, time_text="T")
    assert event is not None
    assert len(event.text.message) == 1000


def looks(*looks: dict[str, str]) -> list[list[str]]:
    changes = EndpointChanges(pool="vllm")
    told = []
    for look in looks:
        told.append([f"{h.reason}: {h.message}" for h in changes.look(look)])
        changes.check_integrity()
    return told


def test_a_healthy_pool_makes_no_event() -> None:
    assert looks({"a": ""}, {"a": "", "b": ""}, {"b": ""}) == [[], [], []]


def test_a_pool_without_endpoints_is_reported_once() -> None:
    first, second, third = looks({}, {}, {"a": ""})
    assert first[0].startswith("NoEndpoints: requests get 503")
    assert second == []
    assert third == ["EndpointsReady: there are endpoints again"]


def test_an_endpoint_that_is_ejected_and_returns_is_reported() -> None:
    _, out, again = looks({"a": "", "b": ""}, {"a": "timeout", "b": ""}, {"a": "", "b": ""})
    assert out == ["EndpointEjected: no requests go to a until scrapes succeed: timeout"]
    assert again == ["EndpointReturned: requests go to a again"]


def test_many_ejected_endpoints_are_one_sentence() -> None:
    well = {f"p{n}": "" for n in range(9)}
    _, out = looks(well, {name: "timeout" if name < "p7" else "" for name in well})
    assert out == [
        "EndpointEjected: no requests go to p0, p1, p2, p3, p4 and 2 more until scrapes succeed: timeout"
    ]
