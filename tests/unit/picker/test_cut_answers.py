"""A server that cuts its answers midway gets no extra traffic, though each answer begins well: the open
loop of `sick_servers`, in simulated time.
"""

from __future__ import annotations

import pytest

from epp.base.types import Address, EndpointName
from epp.config.policy import RuleName
from epp.config.routing import FailureSettings
from epp.picker.events import Cut, PickerEvent
from tests.unit.picker.endpoints.test_failures import chat_request
from tests.unit.picker.picker_questions import A, a_picker
from tests.unit.picker.sick_servers import RULES, SICK, Traffic, begins


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("of_probes", ["probes too", "not the short answers of probes"])
def test_a_server_that_cuts_every_answer_gets_trials_and_is_back(rule: RuleName, of_probes: str) -> None:
    traffic = Traffic(rule=rule, sick=begins, cuts=True, cuts_probes=of_probes == "probes too").run(45.0)
    assert traffic.first_ten_apart() <= 1 / 4
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    assert traffic.to(SICK, since=30.0, until=45.0) >= 0.15


def test_without_probes_a_server_that_cuts_gets_trials_and_is_back() -> None:
    failures = FailureSettings(probe=False)
    traffic = Traffic(sick=begins, cuts=True, failures=failures).run(45.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    assert traffic.to(SICK, since=30.0, until=45.0) >= 0.15


def test_one_cut_answer_counts_as_one_failure_and_is_forgotten() -> None:
    picker = a_picker()
    events: list[PickerEvent] = []
    picker.subscribe(events.append)
    assert picker.news.answer_cut(A, now=1.0)
    state = picker.fleet.get(EndpointName("a"))
    assert state is not None
    assert picker.fleet.failures.share(state, now=1.0) == pytest.approx(0.2)
    assert [(type(event), event.server) for event in events if isinstance(event, Cut)] == [(Cut, state)]
    picker.housekeep(now=60.0)
    assert not picker.fleet.failures.marks


def test_an_address_that_no_endpoint_has_changes_nothing() -> None:
    picker = a_picker()
    assert not picker.news.answer_cut(Address("10.9.9.9", 1), now=1.0)
    assert not picker.fleet.failures.marks


def test_answers_that_end_without_a_cut_lower_the_failure_share() -> None:
    picker = a_picker()
    for _ in range(4):
        picker.news.answer_cut(A, now=1.0)
    state = picker.fleet.get(EndpointName("a"))
    assert state is not None
    assert picker.news.left_out(now=1.0)[state] == "its answers break off midway"
    pick = next(
        p for p in (picker.pick(chat_request(), now=60.0) for _ in range(4)) if p.decision.chosen == "a"
    )
    picker.on_response_headers(pick, status=200, served=A, now=60.1)
    assert picker.fleet.failures.share(state, now=60.1) == pytest.approx(0.59, abs=0.01), (
        "the answers have only begun"
    )
    picker.end(pick, outcome="ended", now=61.0)
    picker.housekeep(now=61.5)
    assert picker.fleet.failures.share(state, now=61.5) == pytest.approx(0.59, abs=0.01), (
        "the access log may still report them"
    )
    picker.housekeep(now=62.1)
    assert picker.fleet.failures.share(state, now=62.1) < 0.5
    assert not picker.news.left_out(now=62.1)


@pytest.mark.parametrize("answers_per_s", [10, 100, 1000])
def test_one_cut_answer_a_second_does_not_leave_a_busy_server_out(answers_per_s: int) -> None:
    picker = a_picker()
    state = picker.fleet.get(EndpointName("a"))
    assert state is not None
    for n in range(10 * answers_per_s):
        now = 1.0 + n / answers_per_s
        picker.news.on_peer_answer(state, failed=False, now=now)
        if n % answers_per_s == 0:
            picker.news.answer_cut(A, now=now)
        if n % answers_per_s == answers_per_s - 1:
            picker.housekeep(now=now)
            assert not picker.news.left_out(now=now), f"after {now:.0f} s"
            assert picker.fleet.failures.share(state, now=now) < 0.4
