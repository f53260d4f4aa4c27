"""The cost of a pick when other pickers have sent requests that are not known here yet."""

from __future__ import annotations

import random
import time

from epp.config.policy import DEFAULT_POLICY
from epp.scheduling.least_cost import LeastCost
from tests.unit.scheduling.snapshots import SeenEndpoint, weighed


def test_a_pick_of_2000_servers_takes_at_most_nine_times_as_long_if_a_few_requests_are_unreported() -> None:
    """Then each pick looks at a large part of the servers, drawn by chance."""
    rule = LeastCost(DEFAULT_POLICY.spec, random.Random(1))
    seen = [SeenEndpoint(f"s{n}") for n in range(2000)]

    def best_s(*, unreported_picks: float) -> float:
        asked, times = weighed(seen, unreported_picks=unreported_picks), []
        for _ in range(20):
            started = time.thread_time()
            rule.rank(asked)
            times.append(time.thread_time() - started)
        return min(times)

    assert best_s(unreported_picks=3.0) < 9 * best_s(unreported_picks=0.0)
