"""Which servers a picker leaves out of its picks after failures, why, and what it forgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from epp.base.types import ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import PolicySpec
from epp.config.routing import FailureSettings
from epp.picker.decision import Question
from epp.picker.endpoints.marks import Form
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import A, a_picker, endpoints, state


def chat_request() -> Question:
    return Question("r", InferenceRequest(kind=ApiKind.CHAT, model="m", stream=True))


def fail_answers(picker: Picker, name: str, *, times: int, now: float) -> None:
    for _ in range(times):
        picker.fleet.failures.failed(state(picker, name), Form.FAILS, now=now)


def started(incarnation: str = "") -> Picker:
    """Return a picker of four servers. `incarnation` names the process of server `a`."""
    return a_picker(on=four(incarnation))


def four(incarnation: str = "") -> list[Endpoint]:
    first, *others = endpoints("abcd")
    return [replace(first, incarnation=incarnation), *others]


def test_the_fallback_list_names_failing_servers_last() -> None:
    picker = a_picker(on=endpoints("abc"))
    fail_answers(picker, "a", times=4, now=1.0)
    pick = picker.pick(chat_request(), now=1.1)
    assert pick.destinations[-1] == A
    assert pick.decision.candidates[-1].excluded == "failing"


def test_no_server_is_left_out_if_all_fail_alike() -> None:
    picker = a_picker(on=endpoints("abcd"))
    for name in "abcd":
        fail_answers(picker, name, times=10, now=1.0)
    assert [c.excluded for c in picker.pick(chat_request(), now=1.1).decision.candidates] == [""] * 4


def test_a_server_kept_because_others_fail_more_comes_back() -> None:
    picker = a_picker(on=endpoints("abcd"))
    fail_answers(picker, "a", times=4, now=1.0)
    for name in "bc":
        fail_answers(picker, name, times=40, now=1.0)
    excluded = {c.name: c.excluded for c in picker.pick(chat_request(), now=1.1).decision.candidates}
    assert excluded == {"a": "", "b": "failing", "c": "failing", "d": ""}
    tried = {
        (pick.decision.chosen, pick.decision.reason)
        for pick in [picker.pick(chat_request(), now=10.0) for _ in range(3)]
    }
    assert ("a", "trial") in tried


def test_at_most_a_share_of_the_servers_is_left_out() -> None:
    picker = a_picker(PolicySpec(failures=FailureSettings(max_left_out_share=0.5)))
    for name in "abc":
        fail_answers(picker, name, times=20, now=1.0)
    excluded = [c.excluded for c in picker.pick(chat_request(), now=1.1).decision.candidates]
    assert excluded.count("failing") == 2


def test_a_single_failure_raises_the_price_and_is_forgotten() -> None:
    picker = a_picker(on=endpoints("ab"))
    fail_answers(picker, "a", times=1, now=1.0)
    priced = {c.name: c for c in picker.pick(chat_request(), now=1.0).decision.candidates}
    assert priced[EndpointName("a")].parts_s["failing"] == pytest.approx(0.2)  # a fifth of a second
    assert priced[EndpointName("a")].score_s == pytest.approx(sum(priced[EndpointName("a")].parts_s.values()))
    later = {c.name: c for c in picker.pick(chat_request(), now=60.0).decision.candidates}
    assert later[EndpointName("a")].parts_s["failing"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("waiting", [None, 0, 1])
def test_a_probe_is_marked_as_queued_if_requests_wait_at_its_server(waiting: int | None) -> None:
    picker = a_picker(on=endpoints("a"))
    fail_answers(picker, "a", times=1, now=1.0)
    page = EndpointMetrics(scraped_at=1.0, waiting=waiting)
    picker.news.observe(EndpointName("a"), page, now=1.0)
    failures = picker.fleet.failures
    failures.failed(state(picker, "a"), Form.FAILS, asked_model="m", now=1.0)
    [probe] = failures.probes_due(now=1.0)
    assert probe.queued == bool(waiting)


def test_probe_is_not_marked_as_queued_if_the_servers_counters_stand_still() -> None:
    picker = a_picker(on=endpoints("a"))
    pick = picker.pick(chat_request(), now=0.5)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=0.6)
    for at in (1.0, 2.0, 3.0, 4.0):
        page = EndpointMetrics(scraped_at=at, generated_tokens=1.0, waiting=5)
        picker.news.observe(EndpointName("a"), page, now=at)
    [probe] = picker.fleet.failures.probes_due(now=4.0)
    assert not probe.queued


def test_the_reason_why_a_server_is_left_out_can_be_shown() -> None:
    picker = a_picker(on=endpoints("abc"))
    fail_answers(picker, "a", times=4, now=1.0)
    states = list(picker.fleet.states())
    why = picker.fleet.failures.why(states, now=1.0)
    assert {state.endpoint.name: reason for state, reason in why.items()} == {"a": "its answers fail"}
    picker.news.set_endpoints(picker.news.endpoints()[1:], now=2.0)
    assert picker.fleet.failures.share(states[0], now=2.0) == 0.0  # forgotten with its endpoint


def test_requests_that_break_with_a_removed_server_blame_no_server() -> None:
    picker = started()
    picks = [picker.pick(chat_request(), now=0.1) for _ in range(24)]
    picker.news.set_endpoints(four()[1:], now=1.0)
    for pick in picks:
        picker.end(pick, outcome="failed" if pick.decision.chosen == "a" else "ended", now=1.1)
    picker.housekeep(now=60.0)  # this also looks for servers that never answered
    assert not picker.fleet.failures.probes_due(now=60.0)
    chosen: Counter[tuple[str, str]] = Counter()
    for n in range(300):
        now = 60.0 + n
        pick = picker.pick(chat_request(), now=now)
        chosen[pick.decision.chosen, pick.decision.reason] += 1
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        picker.end(pick, outcome="ended", now=now)
    assert {reason for _, reason in chosen} == {"load"}
    assert min(chosen.values()) > 60


def test_requests_of_the_old_process_do_not_count_for_the_new_one() -> None:
    picker = started("1")
    picks = [picker.pick(chat_request(), now=0.1) for _ in range(24)]
    picker.news.set_endpoints(four("2"), now=1.0)
    for pick in picks:
        picker.end(pick, outcome="failed" if pick.decision.chosen == "a" else "ended", now=1.1)
    assert not picker.news.left_out(now=1.2)
    assert not picker.fleet.failures.probes_due(now=1.2)


def test_a_probe_of_the_old_process_does_not_count_for_the_new_one() -> None:
    picker = started()
    failures, server = picker.fleet.failures, state(picker, "a")
    failures.failed(server, Form.FAILS, asked_model="m", now=1.0)
    [old] = picker.fleet.failures.probes_due(now=1.0)
    failures.forget(server)
    failures.failed(server, Form.FAILS, asked_model="m", now=2.0)
    before = failures.share(server, now=2.0)
    [_] = picker.fleet.failures.probes_due(now=2.0)
    picker.fleet.failures.probed(old, "ill", now=2.0)
    assert failures.share(server, now=2.0) == before


def test_a_server_that_left_while_its_requests_hung_is_not_kept() -> None:
    servers = endpoints("ab")
    picker = a_picker(on=servers)
    picks = [picker.pick(chat_request(), now=0.01 * n) for n in range(20)]
    for pick in picks:
        if pick.decision.chosen == "b":
            picker.on_response_headers(pick, status=200, served=None, now=0.5)
    picker.news.set_endpoints(servers[1:], now=0.6)
    picker.housekeep(now=60.0)
    picker.fleet.check_integrity()
