"""What pickers learn from each other, also when events are lost, late or out of date."""

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from epp.base.errors import FatalRequestError
from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import Chunks, PolicySpec
from epp.picker.endpoints.marks import Form
from epp.sources.sharing.batches import decode_batch
from tests.invariants.fleet import check_unreported
from tests.unit.picker.picker_questions import ask, policy_of, text
from tests.unit.sources.sharing.pickers import Replica, endpoints, meet, two


def test_a_pick_is_known_to_the_others_with_its_work() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.05), now=10.1)
    chosen = pick.decision.chosen
    assert other.matched(text("p"), now=10.1) == one.matched(text("p"), now=10.1) == {chosen: 31}
    assert other.in_flight_of_peers() == {chosen: 1}
    assert other.undone(now=10.1) == pick.decision.prompt_tokens
    assert other.pick(text("p"), now=10.2).decision.chosen == chosen


def test_a_prompt_that_was_cut_before_a_new_policy_is_not_sent() -> None:
    one, other = two()
    let_go = one.pick(text("p"), now=10.0)
    one.picker.detach(let_go, now=10.0)
    one.end(one.pick(text("q"), now=10.0), now=10.5)
    for each in (one, other):
        each.picker.set_policy(policy_of(PolicySpec(chunks=Chunks(size_bytes=128))))
    for _ in range(2):
        other.receive(one.send(now=11.0), now=11.0)
        one.picker.guesses.computed(let_go, now=11.0)
    assert other.picker.caches.table.entries == 0


@pytest.mark.slow
def test_number_of_unreported_requests_is_estimated_from_the_age_of_news() -> None:
    """Others send fifty requests a second, and a request is known a tenth of a second later. So five are
    not known yet.
    """
    one, other = two()
    assert other.picker.fleet.unreported.picks("m", now=9.0) == 0.0
    for n in range(250):
        one.end(one.pick(text(f"p{n}", 500), now=10.0 + n / 50), now=10.0 + n / 50)
        other.receive(one.send(now=10.1 + n / 50), now=10.1 + n / 50)
    assert other.picker.fleet.unreported.picks("m", now=15.1) == pytest.approx(5.0, rel=0.1)
    assert one.picker.fleet.unreported.picks("m", now=15.1) == 0.0
    assert other.picker.fleet.unreported.picks("m", now=25.1) == pytest.approx(0.0, abs=0.01)
    check_unreported(other.picker.fleet.unreported)


def test_a_server_that_fails_one_picker_is_ejected_by_all() -> None:
    one, other = Replica(1), Replica(2)
    meet([one, other], now=0.0)
    chosen, served = endpoints()[0].name, endpoints()[0].address
    for n in range(4):
        pick = one.pick(text(f"p{n}"), now=1.0 + n / 10, only=served)
        one.end(pick, now=1.0 + n / 10, outcome="failed", status=500)
    meet([one, other], now=1.5)
    shown = other.pick(text("q"), now=1.6).decision.candidates
    assert [c.excluded for c in shown if c.name == chosen] == ["failing"]
    for n in range(3):
        pick = one.pick(text(f"r{n}"), now=8.0 + n / 10)
        one.picker.on_response_headers(pick, status=200, served=served, now=8.0 + n / 10)
        one.picker.end(pick, outcome="ended", now=8.0 + n / 10)
    meet([one, other], now=8.5)
    shown = other.pick(text("s"), now=8.6).decision.candidates
    assert [c.excluded for c in shown if c.name == chosen] == [""]


def hangs_for(replica: Replica, name: str, *, now: float) -> None:
    """Half of twenty requests get no first byte. Those that went elsewhere get one."""
    replica.picker.news.observe(EndpointName(name), EndpointMetrics(scraped_at=now), now=now)
    for n in range(20):
        pick = replica.pick(text(f"{name}{n}"), now=now + n / 100)
        if pick.decision.chosen != name:
            replica.end(pick, now=now + n / 100)
    replica.picker.news.observe(EndpointName(name), None, now=now + 30.0)


def test_a_cut_answer_that_one_picker_reports_counts_once_at_the_others() -> None:
    one, other = Replica(1), Replica(2)
    meet([one, other], now=0.0)
    for n in range(4):
        assert one.picker.news.answer_cut(Address("10.0.0.1", 8000), now=1.0 + n / 100)
    other.receive(one.send(now=1.1), now=1.1)
    for picker in (one.picker, other.picker):
        state = picker.fleet.get(EndpointName("a"))
        assert state is not None
        assert picker.fleet.failures.share(state, now=1.1) == pytest.approx(0.59, abs=0.01)
        assert picker.news.ejected(now=1.1) == {state: "its answers break off midway"}
    events = [event for batch in other.send(now=1.2) for event in decode_batch(batch).events]
    assert not events, "the picker does not report it again"


def test_a_server_that_hangs_for_one_picker_is_ejected_by_all() -> None:
    policy = policy_of(PolicySpec(rule="round-robin"))
    one, other = Replica(1, policy=policy), Replica(2, policy=policy)
    meet([one, other], now=0.0)
    hangs_for(one, "a", now=1.0)
    meet([one, other], now=31.5)
    shown = other.pick(text("q"), now=31.6).decision.candidates
    assert [c.excluded for c in shown if c.name == "a"] == ["failing"]
    why = other.picker.fleet.failures.why(list(other.picker.fleet.states()), now=31.6)
    assert {state.endpoint.name: reason for state, reason in why.items()} == {"a": "its requests hang"}
    answers = 0
    for n in range(30):  # trials among them
        pick = one.pick(text(f"r{n}"), now=40.0 + 6 * n)
        answers += pick.decision.chosen == "a"
        one.end(pick, now=40.1 + 6 * n)
    assert answers >= 2
    meet([one, other], now=230.0)
    assert [c.excluded for c in other.pick(text("s"), now=230.1).decision.candidates] == ["", ""]


def test_a_peers_hang_convicts_no_server_that_a_probe_has_just_proved() -> None:
    one, other = Replica(1), Replica(2)
    meet([one, other], now=0.0)
    state = other.picker.fleet.get(EndpointName("a"))
    assert state is not None
    failures = other.picker.fleet.failures
    failures.failed(state, Form.FAILS, "m", now=30.0)
    (probe,) = failures.probes_due(now=30.0)
    failures.probed(probe, "well", now=30.1)
    hangs_for(one, "a", now=1.0)
    assert one.picker.news.ejected(now=31.4)
    meet([one, other], now=31.5)
    assert not other.picker.news.ejected(now=31.6)


def test_a_request_that_another_endpoint_served_moves_with_its_prefix() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    served = next(e for e in endpoints() if e.address != pick.destinations[0])
    one.picker.on_response_headers(pick, status=200, served=served.address, now=11.0)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.in_flight_of_peers() == {served.name: 1}
    assert set(other.matched(text("p"), now=11.0)) == {served.name}


def test_request_that_is_let_go_is_counted_by_scrapes_and_its_work_drains() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    one.picker.detach(pick, now=10.5)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.in_flight_of_peers() == {}
    assert other.undone(now=11.0) > 0


def test_adapters_that_a_picker_loads_are_known_to_the_others() -> None:
    on = [changed(e, adapters=frozenset({"sql"})) for e in endpoints()]
    one, other = Replica(1, on=on), Replica(2, on=on)
    meet([one, other], now=0.0)
    pick = one.pick(text("p"), now=1.0, model="sql")
    other.receive(one.send(now=1.0), now=1.0)
    state = other.picker.fleet.get(pick.decision.chosen)
    assert state is not None
    assert state.loaded_adapters == {"sql"}
    one.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=2.0)
    one.picker.end(pick, outcome="ended", now=3.0)
    other.receive(one.send(now=3.0), now=3.0)
    for replica in (one, other):
        there = replica.picker.fleet.get(pick.decision.chosen)
        assert there is not None
        assert there.loaded_adapters == {"sql"}


def test_a_request_that_ended_servers_is_refused_by_the_other_pickers_too() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    pick.body_hash = 77
    served = pick.destinations[0]
    one.picker.on_response_headers(pick, status=503, served=served, lost=2, now=10.5)
    other.receive(one.send(now=11.0), now=11.0)
    for replica in (one, other):
        with pytest.raises(FatalRequestError):
            replica.picker.fatal.suspects(77, now=12.0)
        assert not replica.picker.fatal.suspects(78, now=12.0)


@pytest.mark.parametrize(("restarted", "reason"), [(False, "state"), (True, "no_state")])
def test_the_other_pickers_know_which_server_keeps_a_response(*, restarted: bool, reason: str) -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    one.picker.on_made(pick, "resp_1", now=10.5)
    if restarted:  # before the news of the response comes
        other.sees_restart(pick.decision.chosen, now=10.7)
    other.receive(one.send(now=11.0), now=11.0)
    named = replace(ask(text("q")), names_state="resp_1")
    there = other.picker.pick(named, now=12.0).decision
    assert there.reason == reason
    assert restarted or there.chosen == pick.decision.chosen


def test_a_batch_can_be_read_however_long_the_names_of_adapters_are() -> None:
    adapter = "\N{SNOWMAN}" * 1024
    server = Endpoint(EndpointName("a"), Address("10.0.0.1", 8000), model="m", adapters=frozenset({adapter}))
    one = Replica(1, on=[server])
    for _ in range(1000):
        one.pick(b"p", now=1.0, model=adapter)
    assert sum(len(decode_batch(batch).events) for batch in one.send(now=1.0)) == 1000


def test_an_idle_picker_sends_a_batch_once_a_second() -> None:
    one, _ = two()
    assert one.send(now=10.0)
    assert one.send(now=10.5) == []
    assert one.send(now=11.0)
