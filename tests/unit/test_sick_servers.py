"""Servers that fail get hardly any traffic, and get traffic again soon after they have recovered.

An open loop of requests before a picker, in simulated time, shows both.
"""

from __future__ import annotations

from itertools import product

import pytest

from epp.config.policy import RuleName
from epp.config.routing import Failures
from tests.unit.sick_servers import RULES, SICK, Traffic, begins, hang, lacks_x, refuse

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pickers", [1, 3])
def test_a_server_that_fails_at_once_gets_no_more_than_its_share_and_then_trials_only(
    rule: RuleName, pickers: int
) -> None:
    traffic = Traffic(rule=rule, servers="abcde", pickers=pickers).run(20.0)
    assert traffic.first_ten_apart() <= 1 / 5
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02


@pytest.mark.parametrize("rule", RULES)
def test_a_sick_server_is_back_within_ten_seconds_of_its_recovery(rule: RuleName) -> None:
    traffic = Traffic(rule=rule).run(40.0)
    assert traffic.to(SICK, since=30.0, until=40.0) >= 0.15


@pytest.mark.parametrize(
    ("rule", "per_s"), [*product(RULES, [0.5, 2.0, 5.0]), ("least-cost", 200.0), ("round-robin", 200.0)]
)
def test_a_sick_server_is_left_out_under_slow_and_fast_traffic(rule: RuleName, per_s: float) -> None:
    traffic = Traffic(rule=rule, per_s=per_s, sick_to=100.0).run(160.0 if per_s < 10 else 20.0)
    first = min(at for at, name in traffic.sent if name == SICK)
    later = [name for at, name in traffic.sent if first + 5.0 <= at < 100.0]
    assert later.count(SICK) <= 0.02 * len(later)
    assert traffic.first_ten_apart() <= 1 / 4
    if per_s < 10:
        back = min(at for at, name in traffic.sent if name == SICK and at > 100.0)
        assert back <= 110.0 + 1 / per_s
        assert traffic.to(SICK, since=112.0, until=160.0) >= 0.1


def test_without_probes_trials_are_a_larger_share_of_few_requests() -> None:
    failures = Failures(probe=False)
    traffic = Traffic(per_s=5.0, failures=failures).run(40.0)
    assert 0.02 < traffic.to(SICK, since=5.0, until=20.0) <= 0.03
    assert traffic.to(SICK, since=30.0, until=40.0) >= 0.15


def test_a_server_that_refuses_everything_with_429_also_counts_as_sick() -> None:
    assert Traffic(sick=refuse).run(20.0).to(SICK, since=5.0, until=20.0) <= 0.02


@pytest.mark.parametrize("rule", RULES)
def test_a_hanging_server_is_noticed_within_three_seconds(rule: RuleName) -> None:
    traffic = Traffic(rule=rule, sick=hang, sick_from=10.0, sick_to=40.0).run(60.0)
    assert traffic.to(SICK, since=13.0, until=40.0) <= 0.02
    assert traffic.to(SICK, since=50.0, until=60.0) >= 0.15


@pytest.mark.parametrize("rule", RULES)
def test_a_server_whose_answers_begin_and_do_not_go_on_is_noticed_within_three_seconds(
    rule: RuleName,
) -> None:
    traffic = Traffic(rule=rule, sick=begins, stuck=True, sick_from=10.0, sick_to=40.0).run(60.0)
    assert traffic.to(SICK, since=13.0, until=40.0) <= 0.02
    assert traffic.to(SICK, since=50.0, until=60.0) >= 0.15


def test_a_server_whose_answers_stop_is_found_by_probes_if_no_other_server_has_work() -> None:
    traffic = Traffic(
        rule="least-cost", per_s=0.2, sick=begins, stuck=True, sick_from=0.0, sick_to=100.0
    ).run(130.0)
    assert sum(name == SICK for at, name in traffic.sent if 20.0 < at < 100.0) == 0
    assert sum(name == SICK for at, name in traffic.sent if at > 110.0) > 0


def test_a_missing_adapter_keeps_away_only_the_requests_for_it() -> None:
    traffic = Traffic(sick=lacks_x, models=("x",)).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    mixed = Traffic(sick=lacks_x, models=("m", "x")).run(20.0)
    assert mixed.to(SICK, since=5.0, until=20.0) >= 0.1
    assert mixed.failed <= 30


def test_a_retried_request_counts_against_the_first_choice() -> None:
    traffic = Traffic(retries=True).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    assert traffic.failed == 0


def test_no_server_is_left_out_if_the_policy_says_so() -> None:
    never = Failures(max_left_out_share=0.0, cost_seconds=0.0)
    traffic = Traffic(rule="round-robin", failures=never).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) == pytest.approx(0.25, abs=0.01)
