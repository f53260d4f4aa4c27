"""The slots of the endpoints, and the candidates of one request at one moment."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from epp.base.types import Address, Endpoint, EndpointName, Role
from epp.picker.scheduling.snapshot import Roster
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, snapshot

FOUR = [SeenEndpoint(name, backlog=100.0 * n, in_flight=n) for n, name in enumerate("dbca")]


def test_a_roster_has_rank_and_address_of_each_slot() -> None:
    front = Address("10.1.1.1", 80)
    roster = Roster(
        [
            Endpoint(EndpointName("c"), Address("10.0.0.1", 80)),
            Endpoint(EndpointName("a"), Address("10.0.0.2", 80), behind=front, rank=0),
            Endpoint(EndpointName("b"), Address("10.0.0.3", 80), role=Role.PREFILL),
        ]
    )
    assert roster.turn.tolist() == [2, 0, 1]
    assert roster.addresses == [Address("10.0.0.1", 80), front, Address("10.0.0.3", 80)]
    assert roster.answers.tolist() == [True, True, False]


def test_every_picker_hashes_a_name_alike_whatever_its_slot() -> None:
    one, other = (snapshot([SeenEndpoint(name) for name in names]).roster for names in ("abc", "cab"))
    assert len({*one.names_hashed.tolist()}) == 3
    assert one.names_hashed.tolist() == [*other.names_hashed.tolist()[1:], other.names_hashed[0]]


def test_candidates_narrowed_twice_keep_their_slots_and_their_numbers() -> None:
    adapters = snapshot(FOUR, adapter="x")
    some = replace(adapters, failure_share=np.array([0.0, 0.1, 0.2, 0.3]), unreported_picks=3.0)
    few = some.narrowed(np.array([3, 1, 2])).narrowed(np.array([2, 0]))
    assert list(few.slots) == [2, 3]
    assert few.undone_tokens.tolist() == [200, 300]
    assert few.failure_share is not None
    assert few.failure_share.tolist() == [0.2, 0.3]
    assert few.has_adapter is not None
    assert len(few.has_adapter) == len(few) == 2
    assert few.unreported_picks == 3.0
    assert few.turn().tolist() == [2, 0], "the names are c and a"
    assert few.places_by_slot() == {2: 0, 3: 1}


def test_no_candidate_counts_as_failing_among_those_that_are_left() -> None:
    seen = replace(snapshot(FOUR), failing=np.array([True, False, False, False]), trials=[0])
    few = seen.narrowed(np.array([1, 2]))
    assert (few.failing, few.trials) == (None, ())


def test_a_server_whose_answers_all_fail_counts_ten_more_requests() -> None:
    seen = snapshot(FOUR)
    assert seen.burden().tolist() == [0, 1, 2, 3]
    assert replace(seen, failure_share=np.array([1.0, 0.0, 0.5, 0.0])).burden().tolist() == [10, 1, 7, 3]
