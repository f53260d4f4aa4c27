"""What pickers learn from each other of prompts that one server computes for another (P/D)."""

from collections.abc import Iterator

import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName, Role
from epp.picker.events import Pick
from tests.unit.picker.picker_questions import state, text
from tests.unit.sources.sharing.pickers import TIMEOUT_S, Replica, meet

LONG = 80_000
ROLES = {"a": Role.DECODE, "b": Role.DECODE, "c": Role.PREFILL, "d": Role.PREFILL}


def a_replica(number: int) -> Replica:
    """Two busy servers that answer, and two servers that compute prompts."""
    on = [
        Endpoint(EndpointName(name), Address(f"10.0.0.{n}", 8000), model="m", role=role)
        for n, (name, role) in enumerate(ROLES.items(), start=1)
    ]
    return Replica(number, on=on)


Pair = tuple[Replica, Replica]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = a_replica(1), a_replica(2)
    meet([one, other], now=0.0)
    yield one, other
    one.check()
    other.check()


def shared_long_pick(replica: Replica, name: str, *, now: float) -> Pick:
    for decoder in "ab":
        page = EndpointMetrics(scraped_at=now, running=8, waiting=0)
        replica.picker.news.observe(EndpointName(decoder), page, now=now)
    pick = replica.pick(text(name, LONG), now=now)
    assert pick.decision.prefill is not None
    return pick


def helper(pick: Pick) -> str:
    assert pick.decision.prefill is not None
    return pick.decision.prefill.name


def undone_of_replica(replica: Replica, name: str, *, now: float) -> float:
    return state(replica.picker, name).backlog.undone_tokens(now=now, rate=0.0)


def test_tokens_that_a_prefill_server_has_to_compute_are_known_to_others(pair: Pair) -> None:
    one, other = pair
    pick = shared_long_pick(one, "p", now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    assert undone_of_replica(other, helper(pick), now=10.0) == 20_000
    assert undone_of_replica(other, pick.decision.chosen, now=10.0) == 0
    assert other.in_flight_of_peers() == {pick.decision.chosen: 1, helper(pick): 1}
    assert helper(shared_long_pick(other, "q", now=10.0)) != helper(pick), (
        "the next prompt goes to the idle server"
    )


def test_when_the_answer_begins_prefill_server_is_free_and_holds_prompt(pair: Pair) -> None:
    one, other = pair
    pick = shared_long_pick(one, "p", now=10.0)
    one.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=12.0)
    other.receive(one.send(now=12.0), now=12.0)
    assert undone_of_replica(other, helper(pick), now=12.0) == 0
    assert other.in_flight_of_peers() == {pick.decision.chosen: 1}
    assert set(other.matched(text("p", LONG), now=12.0)) == {pick.decision.chosen, helper(pick)}
    one.picker.end(pick, outcome="ended", now=13.0)
    other.receive(one.send(now=13.0), now=13.0)
    assert other.in_flight_of_peers() == {}


@pytest.mark.parametrize("outcome", ["aborted", "silent"])
def test_a_prompt_without_an_answer_leaves_nothing_behind(pair: Pair, outcome: str) -> None:
    one, other = pair
    pick = shared_long_pick(one, "p", now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    if outcome == "aborted":
        one.picker.end(pick, outcome="aborted", now=11.0)
        other.receive(one.send(now=11.0), now=11.0)
    else:
        other.exchange.listener.expire(now=10.0 + TIMEOUT_S + 1)
    assert other.in_flight_of_peers() == {}
    assert undone_of_replica(other, helper(pick), now=17.0) == 0
    assert EndpointName(helper(pick)) not in other.matched(text("p", LONG), now=17.0)


def test_the_other_pickers_also_blame_the_prefill_server_for_an_error(pair: Pair) -> None:
    one, other = pair
    for n in range(12):
        pick = shared_long_pick(one, f"p{n}", now=10.0 + n)
        one.end(pick, now=10.5 + n, outcome="failed", status=500)
        other.receive(one.send(now=10.5 + n), now=10.5 + n)
    failures = other.picker.fleet.failures
    shares = {str(s.endpoint.name): failures.share(s, now=22.0) for s in other.picker.fleet.states()}
    assert max(shares["c"], shares["d"]) > max(shares["a"], shares["b"]) == 0.0


def test_work_of_a_request_that_is_let_go_also_drains_at_prefill_server(pair: Pair) -> None:
    one, other = pair
    pick = shared_long_pick(one, "p", now=10.0)
    one.picker.detach(pick, now=10.1)
    other.receive(one.send(now=10.2), now=10.2)
    assert other.in_flight_of_peers() == {}
    assert undone_of_replica(other, helper(pick), now=10.2) == 20_000
