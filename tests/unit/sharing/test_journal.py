"""What the picker notes for other pickers: one entry for each thing that they must hear of, in order."""

from __future__ import annotations

import random

from epp.config.policy import DEFAULT_POLICY
from epp.decision import PickRequest
from epp.journal import Journal
from epp.picker import Picker
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest

A, B = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000)


def a_picker(journal: Journal | None) -> Picker:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0), journal=journal)
    picker.set_endpoints([Endpoint(EndpointName("a"), A), Endpoint(EndpointName("b"), B)], now=0.0)
    return picker


def a_request() -> PickRequest:
    return PickRequest(
        request_id="r", inference=InferenceRequest(kind=ApiKind.CHAT, prompt=b"x" * 1000, stream=True)
    )


def test_a_request_is_noted_when_it_begins_moves_and_ends() -> None:
    journal: Journal = []
    picker = a_picker(journal)
    pick = picker.pick(a_request(), now=1.0)
    elsewhere = B if pick.destinations[0] == A else A
    picker.on_response_headers(pick, status=200, served=elsewhere, now=2.0)
    picker.end(pick, outcome="ended", now=3.0)
    picker.end(pick, outcome="ended", now=4.0)
    assert [(entry[0], entry[1]) for entry in journal] == [("began", 1.0), ("moved", 2.0), ("over", 3.0)]
    assert {id(entry[2]) for entry in journal} == {id(pick)}


def test_a_request_that_is_let_go_is_over_once() -> None:
    journal: Journal = []
    picker = a_picker(journal)
    pick = picker.pick(a_request(), now=1.0)
    picker.detach(pick, now=2.0)
    picker.end(pick, outcome="ended", now=3.0)
    assert [entry[0] for entry in journal] == ["began", "over"]


def test_a_restart_seen_from_counters_is_noted_and_one_that_the_source_tells_is_not() -> None:
    journal: Journal = []
    picker = a_picker(journal)
    name = EndpointName("a")
    picker.observe(name, EndpointMetrics(scraped_at=1.0, prompt_tokens=500.0, finished=5.0), now=1.0)
    picker.observe(name, EndpointMetrics(scraped_at=2.0, prompt_tokens=10.0, finished=0.0), now=2.0)
    assert [(entry[0], entry[1]) for entry in journal] == [("restarted", 2.0)]
    state = picker.fleet.get(name)
    assert state is not None
    assert state.cold_at == 2.0
    picker.set_endpoints([Endpoint(name, A, incarnation="2")], now=3.0)
    assert len(journal) == 1
    assert state.cold_at == 3.0
