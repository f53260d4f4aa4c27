"""Servers that fail get hardly any traffic, and get it again soon after they recover (simulated time)."""

from itertools import product
from typing import Any

import pytest

from epp.config.policy import FailureSettings, RuleName
from epp.request.response import NO_CONTENT, PARTIAL
from tests.unit.picker.sick_servers import RULES, SICK, Traffic, begins, hang, lacks_x, refuses

pytestmark = pytest.mark.slow

FORMS: dict[str, dict[str, Any]] = {
    "500": {},
    "an error in the stream": {"sick": begins, "body_status": 500},
    "the same, where no body can be read": {"sick": begins, "body_status": 500, "readable": False},
    "no token in the body": {"sick": begins, "body_status": NO_CONTENT},
    "broken JSON": {"sick": begins, "body_status": PARTIAL, "streams": False},
    "401": {"sick": refuses},
    "401, where all servers want a key": {"sick": refuses, "wants_key": True},
}

WAITING: dict[str, Any] = {"servers": "abc", "begins_s": 0.02, "lasts_s": 0.06}
"""Traffic of clients that wait for each answer."""


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One way in which a server alone answers badly, and at once."""
    return FORMS[request.param]


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_server_gets_at_most_its_share_then_trials_then_its_share(
    rule: RuleName, form: dict[str, Any]
) -> None:
    traffic = Traffic(rule=rule, servers="abc", pickers=2, shares=True, sick_to=10.0, **form).run(22.0)
    # Answers that come whole take 2 s at the other servers, and before that there is nothing to compare.
    assert traffic.first_ten_apart() <= (1 / 3 if traffic.streams else 1 / 2)
    assert traffic.to(SICK, since=5.0, until=10.0) <= 0.02
    assert traffic.to(SICK, since=19.0, until=22.0) >= 0.15
    assert not traffic.out


@pytest.mark.parametrize(("rule", "clients"), list(product(RULES, [0, 1, 6, 12])))
def test_a_bad_server_gets_at_most_its_share_of_the_first_ten(
    rule: RuleName, clients: int, form: dict[str, Any]
) -> None:
    """A server that says no at once has nothing in flight, so it looks idle. Without clients that wait, a
    request comes every 25 ms, and what one picker knows reaches the other within 20 ms.
    """
    fields = {**(WAITING if clients else {"servers": "abc"}), **form}
    pickers, until_s = 1 if 0 < clients < 12 else 2, {0: 0.3, 1: 1.0}.get(clients, 0.05)
    runs = [
        Traffic(seed=seed, rule=rule, clients=clients, pickers=pickers, shares=True, sick_one=sick, **fields)
        for seed in range(4)
        for sick in "abc"
    ]
    # More than a third where a refused client keeps to its server at a picker that has not heard of it.
    most = 3 + (pickers + 1) / 3 if rule in ("prefix-hash", "session") else 10 / 3
    assert sum(run.run(until_s).of_first_ten() for run in runs) <= most * len(runs)


@pytest.mark.parametrize(("rule", "status"), list(product(RULES, [500, 401, 302])))
def test_clients_of_a_server_that_falls_ill_leave_it(rule: RuleName, status: int) -> None:
    fields = {**WAITING, "sick": lambda model: (0.002, status), "clients": 12, "sick_from": 1.0}
    runs = [Traffic(seed=seed, rule=rule, sick_one="abc"[seed % 3], **fields) for seed in range(6)]
    assert sum(run.run(1.2).of_first_ten() for run in runs) <= 4 * len(runs)


@pytest.mark.parametrize(("rule", "clients"), [*product(RULES, [1]), ("least-cost", 12), ("session", 12)])
def test_clients_that_wait_for_each_answer_leave_a_bad_server_within_5_s(
    rule: RuleName, clients: int, form: dict[str, Any]
) -> None:
    traffic = Traffic(rule=rule, clients=clients, sick_to=10.0, **WAITING, **form).run(20.0)
    assert traffic.to(SICK, since=0.0, until=5.0) <= 0.15  # where no body can be read, the next page tells
    later = [name for at, name in traffic.sent if 5.0 <= at < 10.0]
    assert later.count(SICK) <= max(1, 0.02 * len(later))
    assert not traffic.out


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "session"])
def test_bad_requests_keep_others_from_no_server(rule: RuleName) -> None:
    """One client sends bad requests as fast as it can, or about one in a second."""
    fields: dict[str, Any] = {"clients": 12, "poisoners": 1, "shares": True, "sick_to": 0.0, **WAITING}
    for poisoner_s, pickers in product((0.002, 1.0), (1, 2)):
        runs = [
            Traffic(seed=seed, rule=rule, poisoner_s=poisoner_s, pickers=pickers, **fields).run(4.0)
            for seed in (1, 2)
        ]
        # By their hashes the twelve prompts give one server a quarter.
        least = 0.1 if rule == "prefix-hash" else 0.15
        assert sum(min(run.to(name, since=1.0, until=4.0) for name in "abc") for run in runs) >= 2 * least


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("poison", "wants_key"), [(400, False), (400, True), (302, True), (204, False)])
def test_clients_with_bad_requests_leave_no_server_out(
    rule: RuleName, poison: int, *, wants_key: bool
) -> None:
    """204: these answers are whole and have no token, at every server."""
    fields: dict[str, Any] = {"poisoners": 1, "poison": poison, "wants_key": wants_key}
    traffic = Traffic(rule=rule, servers="abc", per_s=10.0, sick_to=0.0, lasts_s=0.5, **fields).run(5.0)
    assert len(traffic.sent) > 1400
    # Where probes prove nothing, the same refusals by a second server tell.
    assert traffic.ejected_s == 0.0


def test_bad_requests_do_not_keep_a_server_out_that_is_well_again() -> None:
    """Its first failures are found by a probe that was sent because of refusals."""
    fields: dict[str, Any] = {"sick": begins, "body_status": 500, "sick_to": 5.0, "poisoners": 1}
    traffic = Traffic(rule="session", servers="abc", per_s=20.0, **fields).run(15.0)
    assert traffic.to(SICK, since=10.0, until=15.0) >= 0.15


@pytest.mark.parametrize("rule", RULES)
def test_a_slow_client_with_empty_answers_ejects_servers_for_moments(rule: RuleName) -> None:
    """It keeps to one server, where nearly all answers are its own, until this server is ejected."""
    fields: dict[str, Any] = {"poisoners": 1, "poison": 204, "poisoner_s": 1.0, "per_s": 0.5, "lasts_s": 0.5}
    traffic = Traffic(rule=rule, servers="abc", sick_to=0.0, **fields).run(200.0)
    assert traffic.ejected_s <= 8.0
    assert not traffic.out


@pytest.mark.parametrize(("per_s", "part"), [(5.0, 0.5), (20.0, 0.4)])
def test_answers_that_are_bare_at_all_servers_eject_none_for_long(per_s: float, part: float) -> None:
    fields: dict[str, Any] = {"rule": "session", "servers": "ab", "lasts_s": 1.0, "sick_to": 0.0}
    runs = [Traffic(seed=seed, per_s=per_s, bare_part=part, **fields).run(100.0) for seed in (1, 2, 3)]
    assert sum(run.ejected_s for run in runs) <= 3.0  # of 600


@pytest.mark.parametrize("rule", RULES)
def test_streams_that_stop_after_the_first_token_are_found(rule: RuleName) -> None:
    """They end much sooner than those of the other servers, so they are read."""
    fields: dict[str, Any] = {"sick": begins, "body_status": PARTIAL, "tells_s": 0.25, "sick_to": 20.0}
    traffic = Traffic(rule=rule, servers="abc", pickers=2, shares=True, **fields).run(45.0)
    assert traffic.to(SICK, since=8.0, until=20.0) <= 0.02
    assert traffic.to(SICK, since=40.0, until=45.0) >= 0.15


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("part", "most"), [(0.5, 0.03), (0.34, 0.1)])
def test_a_server_whose_answers_fail_in_part_gets_few_of_them(
    rule: RuleName, part: float, most: float
) -> None:
    traffic = Traffic(rule=rule, servers="abc", sick_part=part, sick_to=60.0).run(75.0)
    assert traffic.to(SICK, since=5.0, until=60.0) <= most
    assert traffic.to(SICK, since=70.0, until=75.0) >= 0.15


@pytest.mark.parametrize("rule", ["least-cost", "affinity", "session"])
def test_a_server_half_of_whose_answers_are_bare_gets_half_its_share(rule: RuleName) -> None:
    fields: dict[str, Any] = {"sick": begins, "body_status": NO_CONTENT, "sick_part": 0.5, "sick_to": 100.0}
    traffic = Traffic(seed=4, rule=rule, servers="abc", per_s=10.0, **fields).run(100.0)
    assert traffic.to(SICK, since=8.0, until=100.0) <= 0.17  # the worst of six seeds; the median is .03


@pytest.mark.parametrize(("rule", "per_s"), [*product(RULES, [0.5, 5.0]), ("least-cost", 200.0)])
def test_a_sick_server_is_ejected_under_slow_and_fast_traffic(rule: RuleName, per_s: float) -> None:
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
    traffic = Traffic(per_s=5.0, failures=FailureSettings(probe=False)).run(40.0)
    assert 0.02 < traffic.to(SICK, since=5.0, until=20.0) <= 0.03
    assert traffic.to(SICK, since=30.0, until=40.0) >= 0.15


@pytest.mark.parametrize("rule", RULES)
def test_a_hanging_server_is_noticed_within_three_seconds(rule: RuleName) -> None:
    traffic = Traffic(rule=rule, sick=hang, sick_from=10.0, sick_to=25.0).run(40.0)
    assert traffic.to(SICK, since=13.0, until=25.0) <= 0.02
    assert traffic.to(SICK, since=34.0, until=40.0) >= 0.15


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slow_first_answers_of_all_servers_are_no_hang(seed: int) -> None:
    """They take 3 to 9 s, and the pickers have just started, so they do not know yet what is usual."""
    slow: dict[str, Any] = {"per_s": 4.0, "begins_s": 6.0, "lasts_s": 10.0, "sick_to": 0.0}
    traffic = Traffic(seed=seed, servers="abc", pickers=2, shares=True, **slow).run(60.0)
    assert traffic.ejected_s <= 0.5


@pytest.mark.parametrize("rule", RULES)
def test_answers_that_begin_and_do_not_go_on_are_noticed(rule: RuleName) -> None:
    traffic = Traffic(rule=rule, sick=begins, stuck=True, sick_from=10.0, sick_to=40.0).run(60.0)
    assert traffic.to(SICK, since=13.0, until=40.0) <= 0.02
    assert traffic.to(SICK, since=50.0, until=60.0) >= 0.15


@pytest.mark.parametrize("rule", RULES)
def test_a_server_whose_page_stands_still_keeps_its_share(rule: RuleName) -> None:
    """A cache before the page may be broken. Probes show that the server works."""
    traffic = Traffic(rule=rule, frozen=True, sick_to=0.0).run(40.0)
    assert traffic.to(SICK, since=0.0, until=40.0) >= 0.2
    assert traffic.ejected_s <= 2.0


def test_answers_that_stop_are_found_by_probes_without_other_work() -> None:
    traffic = Traffic(per_s=0.2, sick=begins, stuck=True, sick_to=100.0).run(130.0)
    assert sum(name == SICK for at, name in traffic.sent if 20.0 < at < 100.0) == 0
    assert sum(name == SICK for at, name in traffic.sent if at > 110.0) > 0


def test_a_missing_adapter_keeps_away_only_the_requests_for_it() -> None:
    traffic = Traffic(sick=lacks_x, models=("x",)).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    mixed = Traffic(sick=lacks_x, models=(*"mmmmmmmmm", "x"), sick_to=60.0).run(60.0)
    assert mixed.to(SICK, since=5.0, until=60.0) >= 0.1
    assert mixed.failed <= 4 + 0.02 * 240  # of 240 requests for it


def test_a_server_that_fails_at_one_model_gets_only_trials_for_each() -> None:
    fails_x = Traffic(sick=lambda m: (0.002, 500) if m == "x" else (0.2, 200), models=("m", "x"))
    assert fails_x.run(20.0).to(SICK, since=5.0, until=20.0) <= 0.02


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("of_probes", ["probes too", "not the short answers of probes"])
def test_a_server_that_cuts_every_answer_gets_trials_and_is_back(rule: RuleName, of_probes: str) -> None:
    traffic = Traffic(rule=rule, sick=begins, cuts=True, cuts_probes=of_probes == "probes too").run(45.0)
    assert traffic.first_ten_apart() <= 1 / 4
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    assert traffic.to(SICK, since=30.0, until=45.0) >= 0.15
