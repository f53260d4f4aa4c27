"""Servers that fail draw no traffic: an open loop of requests against a picker, in simulated time.

Four or five servers, one of them sick for a while. What is counted is what an operator would ask: how many
requests the sick server gets, and how soon it is back in use after it has recovered.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

import pytest

from epp.config.policy import DEFAULT_POLICY, PolicySpec, RuleName
from epp.config.routing import Failures
from epp.decision import Pick, PickRequest
from epp.endpoints.failures import Failures as Failing
from epp.endpoints.marks import Probe, Verdict
from epp.endpoints.prefill_rate import ModelRate
from epp.endpoints.state import EndpointState
from epp.picker import Picker
from epp.scraping.probes import verdict_of
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from tests.unit.picker_questions import policy_of

SICK = "a"
RULES: tuple[RuleName, ...] = get_args(RuleName)


@dataclass
class Traffic:
    """An open loop: requests at even times, well servers take some seconds,
    the sick one does what `sick` says."""

    servers: str = "abcd"
    rule: RuleName = "least-cost"
    per_s: float = 40.0
    sick_from: float = 0.0
    sick_to: float = 20.0
    sick: Callable[[str], tuple[float, int | None]] = lambda model: (0.002, 500)
    """By model, when the answer begins and its status; None:
    no answer, and the client leaves after ten seconds."""
    models: tuple[str, ...] = ("m",)
    retries: bool = False
    pickers: int = 1
    stuck: bool = False
    """The sick server's answers begin, and nothing follows: no token, no end."""
    cuts: bool = False
    """The sick server's answers begin well and break off, which Envoy's access log tells a little later."""
    cuts_probes: bool = True
    probes: bool = True
    """The pickers send their probes, and each is answered as a request would be."""
    failures: Failures = DEFAULT_POLICY.spec.failures
    sent: list[tuple[float, str]] = field(default_factory=list)
    failed: int = 0

    def run(self, until_s: float) -> Traffic:
        rng = random.Random(1)
        fleet = [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate(self.servers, 1)]
        by_address = {e.address: e.name for e in fleet}
        pickers = [
            Picker(policy_of(PolicySpec(rule=self.rule, failures=self.failures)), rng=random.Random(n))
            for n in range(self.pickers)
        ]
        for picker in pickers:
            picker.set_endpoints(fleet, now=0.0)
        tokens = dict.fromkeys(self.servers, 0.0)
        running: Counter[str] = Counter()
        events: list[tuple[float, int, Callable[[float], None]]] = []
        count = 0

        def at(when: float, do: Callable[[float], None]) -> None:
            nonlocal count
            count += 1
            heapq.heappush(events, (when, count, do))

        def scrape(now: float) -> None:
            for name in self.servers:
                if running[name] and not (
                    self.stuck and name == SICK and self.sick_from <= now < self.sick_to
                ):
                    tokens[name] += running[name]
            for picker in pickers:
                for endpoint in fleet:  # the sick server's metrics are fine: it looks idle
                    metrics = EndpointMetrics(scraped_at=now, generated_tokens=tokens[endpoint.name])
                    picker.observe(endpoint.name, metrics, now=now)
            at(now + 1.0, scrape)

        def probe(now: float) -> None:
            for picker in pickers:
                for due in picker.probes_due(now=now):
                    at(*answered(picker, due, now))
            at(now + 0.25, probe)

        def answered(picker: Picker, due: Probe, now: float) -> tuple[float, Callable[[float], None]]:
            ill = due.state.endpoint.name == SICK and self.sick_from <= now < self.sick_to
            delay, status = self.sick(due.model) if ill else (0.1, 200)
            if ill and self.cuts:
                cut: Verdict = "ill" if self.cuts_probes else "well"
                return now + delay, lambda then: picker.probed(due, cut, now=then)
            if status is None or (ill and self.stuck):
                late: Verdict = "unclear" if due.queued else "ill"
                return now + 3.0, lambda then: picker.probed(due, late, now=then)
            verdict = verdict_of(status, about_model=bool(due.about))
            return now + delay, lambda then: picker.probed(due, verdict, now=then)

        def arrive(now: float) -> None:
            at(now + 1 / self.per_s, arrive)
            picker = rng.choice(pickers)
            model = rng.choice(self.models)
            prompt = rng.randbytes(200).hex().encode()
            session = f"s{rng.randrange(1000)}" if self.rule == "session" else ""
            inference = InferenceRequest(kind=ApiKind.CHAT, model=model, prompt=prompt, stream=True)
            pick = picker.pick(PickRequest("r", inference, session=session), now=now)
            picker.housekeep(now=now)
            self.sent.append((now, pick.decision.chosen))
            serve(picker, pick, by_address[pick.destinations[0]], model, now)

        def serve(picker: Picker, pick: Pick, name: str, model: str, now: float) -> None:
            served = next(a for a, n in by_address.items() if n == name)
            ill = name == SICK and self.sick_from <= now < self.sick_to
            delay, status = self.sick(model) if ill else (rng.uniform(0.1, 0.3), 200)
            if status is None:
                at(now + 10.0, lambda then: picker.end(pick, outcome="aborted", now=then))
                self.failed += 1
                return
            if status >= 500 and self.retries and name == by_address[pick.destinations[0]]:
                at(
                    now + delay,
                    lambda then: serve(picker, pick, by_address[pick.destinations[1]], model, then),
                )
                return
            self.failed += status >= 400

            def over(then: float) -> None:
                running[name] -= status == 200
                picker.end(pick, outcome="failed" if status >= 500 else "ended", now=then)

            def told(then: float) -> None:
                assert picker.answer_cut(served, now=then)

            def headers(then: float) -> None:
                picker.on_response_headers(pick, status=status, served=served, now=then)
                if ill and self.stuck:
                    at(then + 10.0, lambda later: picker.end(pick, outcome="aborted", now=later))
                    return
                if ill and self.cuts:
                    at(then + 0.05, lambda later: picker.end(pick, outcome="ended", now=later))
                    at(then + 0.3, told)
                    self.failed += 1
                    return
                tokens[name] += 1
                running[name] += 1
                at(then + (2.0 if status == 200 else 0.0), over)

            at(now + delay, headers)

        at(0.0, scrape)
        if self.probes:
            at(0.1, probe)
        at(0.01, arrive)
        while events and events[0][0] <= until_s:
            when, _, do = heapq.heappop(events)
            do(when)
        for picker in pickers:
            picker.check_integrity()
        return self

    def to(self, name: str, *, since: float, until: float) -> float:
        """Share of the requests of a time that were sent to a server."""
        chosen = [n for at, n in self.sent if since <= at < until]
        return chosen.count(name) / len(chosen)

    def first_ten_apart(self) -> float:
        """Share of the sick server, of the first hundred requests but for the first ten that it got."""
        counts = Counter(name for _, name in self.sent[:100])
        return max(0, counts[SICK] - 10) / 100


def hang(model: str) -> tuple[float, int | None]:
    return 0.0, None


def refuse(model: str) -> tuple[float, int | None]:
    return 0.002, 429


def lacks_x(model: str) -> tuple[float, int | None]:
    return (0.002, 404) if model == "x" else (0.2, 200)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pickers", [1, 3])
def test_a_server_that_fails_at_once_gets_no_more_than_its_share_and_then_trials_only(
    rule: RuleName, pickers: int
) -> None:
    traffic = Traffic(rule=rule, servers="abcde", pickers=pickers).run(20.0)
    assert traffic.first_ten_apart() <= 1 / 5
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02


@pytest.mark.parametrize("rule", RULES)
def test_it_is_back_within_ten_seconds_of_its_recovery(rule: RuleName) -> None:
    traffic = Traffic(rule=rule).run(40.0)
    assert traffic.to(SICK, since=30.0, until=40.0) >= 0.15


@pytest.mark.parametrize(
    ("rule", "per_s"), [*product(RULES, [0.5, 2.0, 5.0]), ("least-cost", 200.0), ("round-robin", 200.0)]
)
def test_slow_and_fast_traffic_alike(rule: RuleName, per_s: float) -> None:
    traffic = Traffic(rule=rule, per_s=per_s, sick_to=100.0).run(160.0 if per_s < 10 else 20.0)
    first = min(at for at, name in traffic.sent if name == SICK)
    later = [name for at, name in traffic.sent if first + 5.0 <= at < 100.0]
    assert later.count(SICK) <= 0.02 * len(later)
    assert traffic.first_ten_apart() <= 1 / 4
    if per_s < 10:
        back = min(at for at, name in traffic.sent if name == SICK and at > 100.0)
        assert back <= 110.0 + 1 / per_s
        assert traffic.to(SICK, since=112.0, until=160.0) >= 0.1


def test_without_probes_trials_are_more_of_few_requests() -> None:
    failures = Failures(probe=False)
    traffic = Traffic(per_s=5.0, failures=failures).run(40.0)
    assert 0.02 < traffic.to(SICK, since=5.0, until=20.0) <= 0.03
    assert traffic.to(SICK, since=30.0, until=40.0) >= 0.15


def test_a_server_that_refuses_everything_with_429_is_sick_too() -> None:
    assert Traffic(sick=refuse).run(20.0).to(SICK, since=5.0, until=20.0) <= 0.02


@pytest.mark.parametrize("rule", RULES)
def test_a_hanging_server_is_noticed_within_three_seconds(rule: RuleName) -> None:
    traffic = Traffic(rule=rule, sick=hang, sick_from=10.0, sick_to=40.0).run(60.0)
    assert traffic.to(SICK, since=13.0, until=40.0) <= 0.02
    assert traffic.to(SICK, since=50.0, until=60.0) >= 0.15


def begins(model: str) -> tuple[float, int | None]:
    return 0.002, 200


@pytest.mark.parametrize("rule", RULES)
def test_a_server_whose_answers_begin_and_do_not_go_on_is_noticed_within_three_seconds(
    rule: RuleName,
) -> None:
    traffic = Traffic(rule=rule, sick=begins, stuck=True, sick_from=10.0, sick_to=40.0).run(60.0)
    assert traffic.to(SICK, since=13.0, until=40.0) <= 0.02
    assert traffic.to(SICK, since=50.0, until=60.0) >= 0.15


def test_such_a_server_is_found_by_probes_where_no_other_server_has_work() -> None:
    traffic = Traffic(
        rule="least-cost", per_s=0.2, sick=begins, stuck=True, sick_from=0.0, sick_to=100.0
    ).run(130.0)
    assert sum(name == SICK for at, name in traffic.sent if 20.0 < at < 100.0) == 0
    assert sum(name == SICK for at, name in traffic.sent if at > 110.0) > 0


def test_a_missing_adapter_keeps_away_the_requests_for_it_and_no_others() -> None:
    traffic = Traffic(sick=lacks_x, models=("x",)).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    mixed = Traffic(sick=lacks_x, models=("m", "x")).run(20.0)
    assert mixed.to(SICK, since=5.0, until=20.0) >= 0.1
    assert mixed.failed <= 30


def test_retries_of_the_data_plane_tell_on_the_first_choice_as_well() -> None:
    traffic = Traffic(retries=True).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) <= 0.02
    assert traffic.failed == 0


def test_the_fallback_list_names_failing_servers_last() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("abc", 1)], now=0.0
    )
    fail(picker, "a", times=4, now=1.0)
    pick = picker.pick(ask(), now=1.1)
    assert pick.destinations[-1] == Address("10.0.0.1", 1)
    assert pick.decision.candidates[-1].excluded == "failing"


def test_where_all_fail_alike_nobody_is_left_out() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("abcd", 1)], now=0.0
    )
    for name in "abcd":
        fail(picker, name, times=10, now=1.0)
    assert [c.excluded for c in picker.pick(ask(), now=1.1).decision.candidates] == [""] * 4


def test_a_server_that_is_kept_in_because_others_fail_more_gets_trials_and_comes_back() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("abcd", 1)], now=0.0
    )
    fail(picker, "a", times=4, now=1.0)
    for name in "bc":
        fail(picker, name, times=40, now=1.0)
    excluded = {c.name: c.excluded for c in picker.pick(ask(), now=1.1).decision.candidates}
    assert excluded == {"a": "", "b": "failing", "c": "failing", "d": ""}
    tried = {
        (pick.decision.chosen, pick.decision.reason)
        for pick in [picker.pick(ask(), now=10.0) for _ in range(3)]
    }
    assert ("a", "trial") in tried


def test_at_most_a_share_of_the_servers_is_left_out() -> None:
    picker = Picker(policy_of(PolicySpec(failures=Failures(max_left_out_share=0.5))), rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("abcdef", 1)], now=0.0
    )
    for name in "abcd":
        fail(picker, name, times=20, now=1.0)
    excluded = [c.excluded for c in picker.pick(ask(), now=1.1).decision.candidates]
    assert excluded.count("failing") == 3


def test_no_server_is_left_out_where_the_policy_says_so() -> None:
    never = Failures(max_left_out_share=0.0, cost_seconds=0.0)
    traffic = Traffic(rule="round-robin", failures=never).run(20.0)
    assert traffic.to(SICK, since=5.0, until=20.0) == pytest.approx(0.25, abs=0.01)


def test_a_single_failure_raises_the_price_and_is_forgotten() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("ab", 1)], now=0.0
    )
    fail(picker, "a", times=1, now=1.0)
    priced = {c.name: c for c in picker.pick(ask(), now=1.0).decision.candidates}
    assert priced[EndpointName("a")].parts_s["failing"] == pytest.approx(0.2)  # a fifth of a second
    assert priced[EndpointName("a")].score_s == pytest.approx(sum(priced[EndpointName("a")].parts_s.values()))
    later = {c.name: c for c in picker.pick(ask(), now=60.0).decision.candidates}
    assert later[EndpointName("a")].parts_s["failing"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("waiting", [None, 0, 1])
def test_a_late_answer_to_a_probe_proves_nothing_where_requests_wait(waiting: int | None) -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints([Endpoint(EndpointName("a"), Address("10.0.0.1", 1))], now=0.0)
    fail(picker, "a", times=1, now=1.0)
    page = EndpointMetrics(scraped_at=1.0, waiting=waiting)
    picker.observe(EndpointName("a"), page, now=1.0)
    failures, settings = picker.fleet.failures, picker.policy.spec.failures
    state = picker.fleet.get(EndpointName("a"))
    assert state is not None
    failures.answered(state, failed=True, asked_model="m", settings=settings, now=1.0)
    [probe] = failures.probes_due(settings=settings, now=1.0)
    assert probe.queued == bool(waiting)


def test_a_queue_explains_no_late_answer_of_a_server_whose_counters_stand_still() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints([Endpoint(EndpointName("a"), Address("10.0.0.1", 1))], now=0.0)
    pick = picker.pick(ask(), now=0.5)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=0.6)
    for at in (1.0, 2.0, 3.0, 4.0):
        page = EndpointMetrics(scraped_at=at, generated_tokens=1.0, waiting=5)
        picker.observe(EndpointName("a"), page, now=at)
    [probe] = picker.probes_due(now=4.0)
    assert not probe.queued


def ask() -> PickRequest:
    return PickRequest("r", InferenceRequest(kind=ApiKind.CHAT, model="m", stream=True))


def fail(picker: Picker, name: str, *, times: int, now: float) -> None:
    state = picker.fleet.get(EndpointName(name))
    assert state is not None
    for _ in range(times):
        picker.fleet.failures.answered(state, failed=True, settings=picker.policy.spec.failures, now=now)


def test_people_are_told_who_is_left_out_and_why() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("abc", 1)], now=0.0
    )
    fail(picker, "a", times=4, now=1.0)
    states = list(picker.fleet.states())
    why = picker.fleet.failures.why(states, settings=picker.policy.spec.failures, now=1.0)
    assert {state.endpoint.name: reason for state, reason in why.items()} == {"a": "its answers fail"}
    picker.set_endpoints(picker.endpoints()[1:], now=2.0)
    assert picker.fleet.failures.share(states[0], now=2.0) == 0.0  # forgotten with its endpoint


def test_a_request_is_not_remembered_for_as_long_as_a_server_says_that_it_takes() -> None:
    failures, settings = Failing(), DEFAULT_POLICY.spec.failures
    state = EndpointState.new(
        Endpoint(EndpointName("a"), Address("10.0.0.1", 1)), model_rate=ModelRate(start=1000.0), now=0.0
    )
    for n in range(100):
        failures.sent(state, streams=True, foretold_s=1e12, settings=settings, now=float(n))
    assert failures.remembered == 100
    failures.look(settings=settings, now=1000.0)
    assert failures.remembered == 0


def started(incarnation: str = "") -> Picker:
    """With four servers and 24 requests open, `a` of them the one that something happens to."""
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    picker.set_endpoints(four(incarnation), now=0.0)
    return picker


def four(incarnation: str = "") -> list[Endpoint]:
    return [
        Endpoint(
            EndpointName(name), Address(f"10.0.0.{n}", 1), incarnation=incarnation if name == "a" else ""
        )
        for n, name in enumerate("abcd", 1)
    ]


def test_requests_that_break_with_a_removed_server_are_held_against_nobody() -> None:
    picker = started()
    picks = [picker.pick(ask(), now=0.1) for _ in range(24)]
    picker.set_endpoints(four()[1:], now=1.0)
    for pick in picks:
        picker.end(pick, outcome="failed" if pick.decision.chosen == "a" else "ended", now=1.1)
    picker.housekeep(now=60.0)  # what never answered is looked for as well
    assert not picker.probes_due(now=60.0)
    chosen: Counter[tuple[str, str]] = Counter()
    for n in range(300):
        now = 60.0 + n
        pick = picker.pick(ask(), now=now)
        chosen[pick.decision.chosen, pick.decision.reason] += 1
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        picker.end(pick, outcome="ended", now=now)
    assert {reason for _, reason in chosen} == {"load"}
    assert min(chosen.values()) > 60


def test_requests_that_break_with_the_old_process_are_not_held_against_the_new_one() -> None:
    picker = started("1")
    picks = [picker.pick(ask(), now=0.1) for _ in range(24)]
    picker.set_endpoints(four("2"), now=1.0)
    for pick in picks:
        picker.end(pick, outcome="failed" if pick.decision.chosen == "a" else "ended", now=1.1)
    assert not picker.left_out(now=1.2)
    assert not picker.probes_due(now=1.2)


def test_a_probe_of_the_old_process_says_nothing_of_the_new_one() -> None:
    picker = started()
    failures, settings = picker.fleet.failures, picker.policy.spec.failures
    state = picker.fleet.get(EndpointName("a"))
    assert state is not None
    failures.answered(state, failed=True, asked_model="m", settings=settings, now=1.0)
    [old] = picker.probes_due(now=1.0)
    failures.forget(state)
    failures.answered(state, failed=True, asked_model="m", settings=settings, now=2.0)
    before = failures.share(state, now=2.0)
    [_] = picker.probes_due(now=2.0)
    picker.probed(old, "ill", now=2.0)
    assert failures.share(state, now=2.0) == before


def test_a_server_whose_client_reads_slowly_does_not_hang() -> None:
    picker = started()
    held = picker.pick(ask(), now=0.1)
    picker.on_response_headers(held, status=200, served=held.destinations[0], now=0.2)
    for n in range(300):
        now = 1.0 + 0.2 * n
        for endpoint in four():
            busy = endpoint.name != held.decision.chosen or n < 10
            tokens = float(5 * (n if busy else 10))
            page = EndpointMetrics(
                scraped_at=now, running=0, waiting=0, generated_tokens=tokens, prompt_tokens=1.0, finished=1.0
            )
            picker.observe(endpoint.name, page, now=now)
        picker.housekeep(now=now)
        assert not picker.left_out(now=now)
        assert not picker.probes_due(now=now)


def test_a_server_that_left_while_its_requests_hung_is_not_kept() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
    servers = [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate("ab", 1)]
    picker.set_endpoints(servers, now=0.0)
    picks = [picker.pick(ask(), now=0.01 * n) for n in range(20)]
    for pick in picks:
        if pick.decision.chosen == "b":
            picker.on_response_headers(pick, status=200, served=None, now=0.5)
    picker.set_endpoints(servers[1:], now=0.6)
    picker.housekeep(now=60.0)
    assert not picker.fleet.failures.remembered
    picker.fleet.failures.check_integrity()
