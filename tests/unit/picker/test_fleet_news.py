"""How a picker handles news of its servers: failed scrapes, cut answers, models that come and go."""

import pytest

from epp.base.types import Address, EndpointMetrics, EndpointName, ModelCard, ModelList
from epp.config.flow import Flow
from epp.config.policy import FailureSettings, PolicySpec
from epp.picker.events import Cut, Pick, PickerEvent
from epp.picker.gate import NO_CLAIM, Gate
from epp.picker.picker import Picker
from tests.harness.steps import blocks
from tests.invariants.flow import check_gate
from tests.unit.picker.picker_questions import A, a_picker, ask, endpoints, serve, state, text
from tests.unit.picker.sick_servers import SICK, Traffic, begins


def rename(picker: Picker, server: str, model: str, *, now: float) -> None:
    picker.news.take_lists({EndpointName(server): ModelList((ModelCard(model),))}, now=now)


def test_names_on_a_page_stand_for_a_list_that_was_refused_before_it() -> None:
    """Pickers that name a model differently would share neither bounds nor shares of their queues."""
    picker = a_picker(on=endpoints("a"))
    name, page = EndpointName("a"), EndpointMetrics(scraped_at=1.0, models=frozenset({"m"}))
    picker.news.observe(name, page, now=1.0)
    assert picker.fleet.models == {""}, "it was not asked yet"
    picker = a_picker(on=endpoints("a"))
    picker.news.take_lists({name: None}, now=0.0)
    picker.news.observe(name, page, now=1.0)
    assert picker.fleet.models == {"m"}


@pytest.mark.slow
def test_server_that_changes_its_model_all_the_time_leaves_nothing_behind() -> None:
    picker = a_picker(on=endpoints("ab"))
    rename(picker, "b", "m", now=0.0)
    sizes = []
    for n in range(2100):
        if n in (1050, 2099):  # before each of these, as many models have left as the picker may keep
            sizes.append(blocks())
        rename(picker, "a", f"base-{n}", now=float(n))
    assert sizes[1] - sizes[0] < 2500  # without the limit there were 17 for each name
    assert picker.caches.token_estimate("m") is picker.caches.token_estimate("m")


def test_what_a_served_model_taught_stays_while_other_names_come_and_go() -> None:
    picker = a_picker(on=endpoints("ab"))
    rename(picker, "b", "m", now=0.0)
    serve(picker, ask(text("one")), now=1.0)
    learned = picker.caches.token_estimate("m")
    for n in range(1000):
        rename(picker, "a", f"base-{n}", now=2.0)
    assert picker.caches.token_estimate("m") is learned


@pytest.mark.slow
def test_queues_of_models_that_no_server_has_any_more_are_forgotten() -> None:
    """Each queue has its own time series."""
    picker = a_picker(PolicySpec(flow=Flow(mode="Hold")), on=endpoints("a"))
    gate = Gate(picker)
    for n in range(1000):
        rename(picker, "a", f"base-{n}", now=float(n))
        pick = gate.offer(
            ask(text(str(n)), model=f"base-{n}"),
            NO_CLAIM,
            _never,
            size_bytes=10,
            longest_s=10.0,
            now=float(n),
        )
        assert isinstance(pick, Pick)
        picker.end(pick, outcome="ended", now=float(n))
    check_gate(gate)
    assert len(gate.status(now=1000.0)) < 300


def _never(*_: object) -> None:
    raise AssertionError("nothing waits")


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
    server = state(picker, "a")
    assert picker.fleet.failures.share(server, now=1.0) == pytest.approx(0.2)
    assert [(type(event), event.server) for event in events if isinstance(event, Cut)] == [(Cut, server)]
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
    server = state(picker, "a")
    assert picker.news.ejected(now=1.0)[server] == "its answers break off midway"
    pick = next(
        p
        for p in (picker.pick(ask(b"", stream=True), now=60.0) for _ in range(4))
        if p.decision.chosen == "a"
    )
    picker.on_response_headers(pick, status=200, served=A, now=60.1)
    assert picker.fleet.failures.share(server, now=60.1) == pytest.approx(0.59, abs=0.01), (
        "the answers have only begun"
    )
    picker.end(pick, outcome="ended", now=61.0)
    picker.housekeep(now=61.5)
    assert picker.fleet.failures.share(server, now=61.5) == pytest.approx(0.59, abs=0.01), (
        "the access log may still report them"
    )
    picker.housekeep(now=62.1)
    assert picker.fleet.failures.share(server, now=62.1) < 0.5
    assert not picker.news.ejected(now=62.1)


@pytest.mark.parametrize("answers_per_s", [10, 100, 1000])
def test_one_cut_answer_a_second_does_not_leave_a_busy_server_out(answers_per_s: int) -> None:
    picker = a_picker()
    server = state(picker, "a")
    for n in range(10 * answers_per_s):
        now = 1.0 + n / answers_per_s
        picker.news.on_peer_answer(server, failed=False, now=now)
        if n % answers_per_s == 0:
            picker.news.answer_cut(A, now=now)
        if n % answers_per_s == answers_per_s - 1:
            picker.housekeep(now=now)
            assert not picker.news.ejected(now=now), f"after {now:.0f} s"
            assert picker.fleet.failures.share(server, now=now) < 0.4
