"""Endpoints that are data parallel ranks of one server: which server gets the request, and which rank the
pick names.
"""

from __future__ import annotations

import pytest

from epp.base.errors import NoEndpointError
from epp.base.types import RANK, RANK_ADDRESS, Address, Endpoint, EndpointName
from epp.picker.decision import Question
from epp.serve.envoy.files import render_endpoints
from tests.unit.picker.picker_questions import ELSEWHERE, a_picker, ask, in_flight, serve, text

FRONT, OTHER = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000)


def ranks() -> list[Endpoint]:
    """Return two servers of two ranks each."""
    return [
        Endpoint(EndpointName(f"{front.host}/{n}"), Address(front.host, 8001 + n), rank=n, behind=front)
        for front in (FRONT, OTHER)
        for n in (0, 1)
    ]


@pytest.mark.parametrize("hurried", [False, True])
def test_the_front_is_the_destination_and_the_headers_name_the_rank(hurried: bool) -> None:  # noqa: FBT001
    picker = a_picker(on=ranks())
    pick = picker.pick(Question("r", ask(text("p")).inference, hurried=hurried), now=1.0)
    state = picker.fleet.get(pick.decision.chosen)
    assert state is not None
    assert pick.destinations == pick.decision.destinations == (state.endpoint.behind,)
    rank = {RANK_ADDRESS: str(state.endpoint.address), RANK: str(state.endpoint.rank)}
    assert dict(pick.set_headers) == rank


def test_each_rank_has_its_own_cache_and_load() -> None:
    picker = a_picker(on=ranks())
    homes = {serve(picker, ask(text(f"p{n}")), now=1.0 + n).decision.chosen for n in range(8)}
    assert len(homes) > 1
    first = picker.pick(ask(text("p0")), now=9.5)
    assert first.decision.reason == "prefix"
    assert in_flight(picker) == {first.decision.chosen: 1}
    assert not picker.on_response_headers(first, status=200, served=first.destinations[0], now=9.6)


def test_the_subset_names_fronts() -> None:
    picker = a_picker(on=ranks())
    for n in range(8):
        pick = picker.pick(ask(text(f"p{n}"), subset=frozenset({OTHER})), now=1.0)
        assert pick.destinations == (OTHER,)
    with pytest.raises(NoEndpointError):
        picker.pick(ask(text("p"), subset=frozenset({ELSEWHERE})), now=1.0)


def test_the_file_for_envoy_has_only_fronts() -> None:
    told = render_endpoints(ranks())
    assert told.count(b'"address": "10.0.0.1"') == 1
    assert b"8001" not in told
