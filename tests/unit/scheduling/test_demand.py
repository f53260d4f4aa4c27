"""When each prefix was last asked for."""

from __future__ import annotations

from epp.scheduling.demand import Demand


def came(demand: Demand, prefix: int, *, now: float, least_s: float = 0.0, most_s: float = 99.0) -> object:
    earlier = demand.earlier(prefix, now=now)
    return earlier.between(least_s, most_s) if earlier is not None else None


def test_the_requests_for_a_prefix_within_a_time_are_counted_and_all_requests_since_the_first_of_them() -> (
    None
):
    demand = Demand()
    assert came(demand, 7, now=1.0) is None
    demand.asked(7, now=1.0)
    demand.asked(8, now=2.0)
    demand.asked(0, now=3.0)
    demand.asked(7, now=4.0)
    assert came(demand, 7, now=4.0) == (2, 4)
    assert came(demand, 7, now=4.0, most_s=2.0) == (1, 1)
    assert came(demand, 7, now=4.0, least_s=1.0) == (1, 4)
    assert came(demand, 7, now=4.0, least_s=1.0, most_s=2.0) == (0, 0)
    assert came(demand, 8, now=4.0) == (1, 3)
    assert came(demand, 0, now=4.0) is None, "no server held a part of the prompt"


def test_of_many_prefixes_and_many_requests_the_last_ones_stay() -> None:
    demand = Demand()
    for n in range(40):
        demand.asked(1, now=float(n))
    assert came(demand, 1, now=40.0) == (32, 32)
    for prefix in range(2, 4097):
        demand.asked(prefix, now=50.0)
    demand.asked(1, now=60.0)
    demand.asked(5000, now=60.0)
    demand.check_integrity()
    assert came(demand, 2, now=60.0) is None, "used least recently"
    assert came(demand, 1, now=60.0, most_s=1.0) == (1, 2)
    assert came(demand, 3, now=60.0) is not None
