"""The queue of one base model: its forecasts are the picker's own choices, and people see its figures."""

from __future__ import annotations

from math import inf

import pytest

from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.config.routing import Cost
from epp.picker.decision import DIRECT
from epp.picker.flow.control import Forecast
from epp.picker.gate import FlowClaim, Gate, ModelQueue, WaitingRequest, forecast_of
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, text

RATE = 100.0
"""Prompt tokens that each server computes in a second."""


def busy_picker(spec: PolicySpec | None = None, *, busy: int) -> Picker:
    """Return a picker of two servers. The first `busy` servers in turn each have one request."""
    picker = a_picker(
        spec or PolicySpec(rule="round-robin", cost=Cost(prefill_tokens_per_second=RATE)),
        on=endpoints("ab", model="m"),
    )
    for n in range(busy):
        picker.pick(ask(text(f"busy {n}")), now=0.0)
    return picker


def waiting_at(queue: ModelQueue, picker: Picker) -> WaitingRequest:
    request = ask(text("waits"))
    return WaitingRequest(request, picker.consider(request, now=0.0).prompt, queue, _never)


def _never(*_: object) -> None:
    raise AssertionError("no request is decided")


def test_the_figures_of_all_servers_follow_from_their_backlogs() -> None:
    picker = busy_picker(busy=1)
    queue = ModelQueue(picker, "m", Flow())
    assert queue.least_wait_s(now=0.0) == 0.0, "one server is idle"
    picker.pick(ask(text("another")), now=0.0)
    assert queue.least_wait_s(now=0.0) > 0.0


def test_a_model_without_servers_has_no_backlog() -> None:
    queue = ModelQueue(busy_picker(busy=1), "absent", Flow())
    assert queue.least_wait_s(now=0.0) == 0.0


def test_other_servers_are_considered_only_for_a_missed_deadline() -> None:
    picker = busy_picker(busy=2)
    picker.pick(ask(text("third", 80_000)), now=0.0)
    picker.pick(ask(text("fourth")), now=0.0)
    considered = picker.consider(ask(text("new")), now=0.0)
    forecast = forecast_of(considered, left_s=inf)
    assert forecast.soonest_s == forecast.wait_s + forecast.own_s
    assert forecast.own_s == pytest.approx(forecast.tokens / RATE, abs=1 / RATE)
    urgent = forecast_of(considered, left_s=forecast.soonest_s - 1.0)
    assert urgent.soonest_s < forecast.soonest_s - 1.0, "the other server has less to do"
    assert (urgent.wait_s, urgent.own_s) == (forecast.wait_s, forecast.own_s)


def test_a_forecast_has_the_choice_that_is_committed() -> None:
    picker = busy_picker(busy=1)
    queue = ModelQueue(picker, "m", Flow())
    forecast = queue.forecast(waiting_at(queue, picker), now=0.0)
    pick = picker.commit(forecast.choice, queued=DIRECT, now=0.0)
    assert pick.decision.prompt_tokens - pick.decision.matched_tokens == pytest.approx(forecast.tokens, abs=1)


def test_a_request_that_no_server_can_take_goes_to_the_picker_at_once() -> None:
    picker = busy_picker(busy=0)
    queue = ModelQueue(picker, "m", Flow())
    waiting = waiting_at(queue, picker)
    picker.news.set_endpoints([], now=0.0)
    assert queue.forecast(waiting, now=0.0) == Forecast(0.0, 0.0, 0.0, 1)


def test_people_see_the_tenants_with_most_tokens_and_others_under_one_name() -> None:
    flow = Flow(mode="Hold", max_tenants=1)
    picker = busy_picker(PolicySpec(flow=flow, cost=Cost(prefill_tokens_per_second=RATE)), busy=2)
    gate = Gate(picker)
    for tenant, size in (("a", 4000), ("b", 8000), ("c", 8000)):
        claim, request = FlowClaim(tenant=tenant), ask(text(tenant, size))
        gate.offer(request, claim, _never, size_bytes=size, longest_s=inf, now=0.0)
    [status] = gate.status(now=0.0)
    assert [(of.tenant, of.requests) for of in status.tenants] == [("(others)", 2), ("a", 1)]
    assert status.requests == {0: 3}
    assert status.tokens == {0: sum(of.tokens for of in status.tenants)}
