"""When each prefix was last asked for."""

from __future__ import annotations

from epp.scheduling.demand import Demand, Earlier


def test_each_earlier_request_says_how_long_ago_it_came_and_how_many_came_since() -> None:
    demand = Demand()
    assert demand.earlier(7, now=1.0) == []
    demand.asked(7, now=1.0)
    demand.asked(8, now=2.0)
    demand.asked(0, now=3.0)
    demand.asked(7, now=4.0)
    assert demand.earlier(7, now=4.0) == [Earlier(3.0, 4), Earlier(0.0, 1)]
    assert demand.earlier(8, now=4.0) == [Earlier(2.0, 3)]
    assert demand.earlier(0, now=4.0) == [], "no server held a part of the prompt"


def test_of_many_prefixes_and_many_requests_the_last_ones_stay() -> None:
    demand = Demand()
    for n in range(40):
        demand.asked(1, now=float(n))
    assert [came.ago_s for came in demand.earlier(1, now=40.0)] == [40.0 - n for n in range(8, 40)]
    for prefix in range(2, 4097):
        demand.asked(prefix, now=50.0)
    demand.asked(1, now=60.0)
    demand.asked(5000, now=60.0)
    demand.check_integrity()
    assert demand.earlier(2, now=60.0) == [], "used least recently"
    assert demand.earlier(1, now=60.0)[-1].ago_s == 0.0
    assert len(demand.earlier(3, now=60.0)) == 1
