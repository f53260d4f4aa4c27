"""Requests that end servers: which are refused, which go to one server only, and which are forgotten."""

import pytest

from epp.base.errors import FatalRequestError
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.picker.remembered import FatalRequests
from tests.invariants.picker import check_fatal
from tests.unit.picker.picker_questions import endpoints

BODY = 77


def server(*, in_flight: int = 1) -> EndpointState:
    state = EndpointState(endpoints("a")[0], PrefillRate(ModelRate(start=1000.0)))
    state.in_flight = in_flight
    return state


def fate(requests: FatalRequests, body: int = BODY, *, now: float) -> str:
    check_fatal(requests)
    try:
        return "once" if requests.suspects(body, now=now) else "free"
    except FatalRequestError:
        return "refused"


def test_a_request_that_ended_two_servers_is_refused_for_minutes() -> None:
    requests = FatalRequests()
    requests.ended(BODY, [server()], tries=2, now=10.0)
    assert [fate(requests, now=now) for now in (10.0, 309.0, 310.0, 909.0, 910.0)] == [
        "refused", "refused", "once", "once", "free",
    ]  # fmt: skip
    assert fate(requests, BODY + 1, now=10.0) == "free", "only the same request"


@pytest.mark.parametrize("in_flight", [1, 9])
def test_a_request_that_may_have_ended_a_server_goes_to_one_more_at_most(in_flight: int) -> None:
    requests = FatalRequests()
    requests.ended(BODY, [server(in_flight=in_flight)], tries=1 if in_flight == 1 else 2, now=10.0)
    assert fate(requests, now=20.0) == "once"
    requests.ended(BODY, [server()], tries=1, now=30.0)
    assert fate(requests, now=31.0) == "refused"


def test_the_last_of_many_that_a_server_lost_is_not_taken_for_its_end() -> None:
    requests, lost = FatalRequests(), server(in_flight=3)
    for n in (3, 2, 1):
        lost.in_flight = n
        requests.ended(n, [lost], tries=2, now=10.0)
    assert [fate(requests, n, now=11.0) for n in (3, 2, 1)] == ["once"] * 3


@pytest.mark.parametrize(("own", "peers"), [(5, 0), (1, 4)], ids=["own", "of other pickers"])
def test_others_at_the_first_of_two_servers_make_a_request_only_suspected(own: int, peers: int) -> None:
    requests, first = FatalRequests(), server(in_flight=own)
    first.peers_in_flight = peers
    requests.ended(BODY, [first, server(in_flight=0)], tries=2, now=10.0)
    assert fate(requests, now=11.0) == "once"


def test_a_good_answer_clears_a_suspect() -> None:
    requests = FatalRequests()
    requests.ended(BODY, [server()], tries=1, now=10.0)
    requests.answered(BODY)
    assert fate(requests, now=11.0) == "free"


def test_the_memory_is_bounded_and_the_oldest_goes_first() -> None:
    requests = FatalRequests()
    for n in range(1, 5001):
        requests.ended(n, [server()], tries=2, now=1.0)
    assert [fate(requests, body, now=1.0) for body in (1, 5000)] == ["free", "refused"]
