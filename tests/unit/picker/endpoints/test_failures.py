"""Which servers a picker leaves out after failures, and what it forgets; refused requests and load."""

from collections import Counter
from dataclasses import replace

import pytest

from epp.base.types import EndpointMetrics, EndpointName
from epp.config.policy import FailureSettings, PolicySpec
from epp.picker.endpoints.answers import Answers, Movement
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.marks import Form
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.picker.scheduling.snapshot import Snapshot
from tests.invariants.picker import check_picker
from tests.unit.picker.endpoints.bookings import a_state, book
from tests.unit.picker.picker_questions import ADDRESSES, ELSEWHERE, a_picker, ask, endpoints, state, text


def fail_answers(picker: Picker, name: str, *, times: int, now: float) -> None:
    for _ in range(times):
        picker.fleet.failures.failed(state(picker, name), Form.FAILS, now=now)


def test_no_server_is_ejected_if_all_fail_alike() -> None:
    picker = a_picker(on=endpoints("abcd"))
    for name in "abcd":
        fail_answers(picker, name, times=10, now=1.0)
    assert [c.excluded for c in picker.pick(ask(b"", stream=True), now=1.1).decision.candidates] == [""] * 4


def test_a_server_kept_because_others_fail_more_comes_back() -> None:
    picker = a_picker(on=endpoints("abcd"))
    fail_answers(picker, "a", times=4, now=1.0)
    for name in "bc":
        fail_answers(picker, name, times=40, now=1.0)
    excluded = {c.name: c.excluded for c in picker.pick(ask(b"", stream=True), now=1.1).decision.candidates}
    assert excluded == {"a": "", "b": "failing", "c": "failing", "d": ""}
    tried = {
        (pick.decision.chosen, pick.decision.reason)
        for pick in [picker.pick(ask(b"", stream=True), now=10.0) for _ in range(3)]
    }
    assert ("a", "trial") in tried


@pytest.mark.parametrize(("share", "count"), [(0.5, 2), (0.0, 0)])
def test_at_most_a_share_of_the_servers_is_ejected(share: float, count: int) -> None:
    picker = a_picker(PolicySpec(failures=FailureSettings(max_ejected_share=share)))
    for name in "abc":
        fail_answers(picker, name, times=20, now=1.0)
    excluded = [c.excluded for c in picker.pick(ask(b"", stream=True), now=1.1).decision.candidates]
    assert excluded.count("failing") == count


def test_requests_that_a_server_could_not_serve_bring_it_no_trials() -> None:
    picker = a_picker(on=[replace(e, model=m) for e, m in zip(endpoints("abcd"), "mmnn", strict=True)])
    fail_answers(picker, "a", times=4, now=1.0)
    for asked in ("n" * 100, "m"):
        picks = [picker.pick(ask(b"", model=model, stream=True), now=3.0) for model in asked]
        assert {pick.decision.reason for pick in picks} == {"load"}


def test_one_failure_shows_as_a_fifth_of_a_second_and_is_forgotten() -> None:
    picker = a_picker(on=endpoints("ab"))
    fail_answers(picker, "a", times=1, now=1.0)
    for now, price_s in ((1.0, 0.2), (60.0, 0.0)):
        shown = {c.name: c for c in picker.pick(ask(b"", stream=True), now=now).decision.candidates}
        a = shown[EndpointName("a")]
        assert [a.parts_s["failing"], a.score_s] == pytest.approx([price_s] * 2, abs=0.01)


@pytest.mark.parametrize("waiting", [None, 0, 1])
def test_a_probe_is_marked_as_queued_if_requests_wait_at_its_server(waiting: int | None) -> None:
    picker = a_picker(on=endpoints("a"))
    fail_answers(picker, "a", times=1, now=1.0)
    page = EndpointMetrics(scraped_at=1.0, waiting=waiting)
    picker.news.observe(EndpointName("a"), page, now=1.0)
    failures = picker.fleet.failures
    failures.failed(state(picker, "a"), Form.FAILS, "m", now=1.0)
    [probe] = failures.probes_due(now=1.0)
    assert probe.queued == bool(waiting)


def test_probe_is_not_marked_as_queued_if_the_servers_counters_stand_still() -> None:
    picker = a_picker(on=endpoints("a"))
    pick = picker.pick(ask(b"", stream=True), now=0.5)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=0.6)
    for at in (1.0, 2.0, 3.0, 4.0):
        page = EndpointMetrics(scraped_at=at, generated_tokens=1.0, waiting=5)
        picker.news.observe(EndpointName("a"), page, now=at)
    [probe] = picker.fleet.failures.probes_due(now=4.0)
    assert not probe.queued


def test_the_reason_why_a_server_is_ejected_can_be_shown() -> None:
    picker = a_picker(on=endpoints("abc"))
    fail_answers(picker, "a", times=4, now=1.0)
    states = list(picker.fleet.states())
    why = picker.fleet.failures.why(states, now=1.0)
    assert {state.endpoint.name: reason for state, reason in why.items()} == {"a": "its answers fail"}
    picker.news.set_endpoints(picker.news.endpoints()[1:], now=2.0)
    assert picker.fleet.failures.share(states[0], now=2.0) == 0.0  # forgotten with its endpoint


def test_requests_that_break_with_a_removed_server_blame_no_server() -> None:
    picker = a_picker(on=endpoints("abcd"))
    picks = [picker.pick(ask(b"", stream=True), now=0.1) for _ in range(24)]
    picker.news.set_endpoints(endpoints("bcd"), now=1.0)
    for pick in picks:
        picker.end(pick, outcome="failed" if pick.decision.chosen == "a" else "ended", now=1.1)
    picker.housekeep(now=60.0)  # this also looks for servers that never answered
    assert not picker.fleet.failures.probes_due(now=60.0)
    chosen: Counter[tuple[str, str]] = Counter()
    for n in range(300):
        now = 60.0 + n
        pick = picker.pick(ask(b"", stream=True), now=now)
        chosen[pick.decision.chosen, pick.decision.reason] += 1
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        picker.end(pick, outcome="ended", now=now)
    assert {reason for _, reason in chosen} == {"load"}
    assert min(chosen.values()) > 60


def test_refusals_of_a_removed_server_raise_no_price_of_another_one() -> None:
    picker = a_picker(on=endpoints("abcd"))
    picks = [send(picker, "a", b"x", now=0.1) for _ in range(3)]
    picker.news.set_endpoints(endpoints("bcd"), now=1.0)
    for pick in picks:
        picker.on_response_headers(pick, status=400, served=pick.destinations[0], now=1.1)
    shown = picker.pick(ask(b"", stream=True), now=1.1).decision.candidates
    assert [candidate.parts_s["failing"] for candidate in shown] == [0.0] * 3
    assert not picker.fleet.failures.probes_due(now=1.2), "another server may have its address"


def test_a_server_outside_the_fleet_is_never_probed() -> None:
    picker = a_picker(on=endpoints("abcd"))
    pick = picker.pick(ask(b"x", stream=True), now=0.1)
    picker.on_response_headers(pick, status=503, served=ELSEWHERE, now=0.2)
    probed = [probe.state.endpoint.address for probe in picker.fleet.failures.probes_due(now=1.0)]
    assert probed == [pick.destinations[0]]


def test_requests_of_the_old_process_do_not_count_for_the_new_one() -> None:
    first, *others = endpoints("abcd")
    picker = a_picker(on=[replace(first, incarnation="1"), *others])
    picks = [picker.pick(ask(b"", stream=True), now=0.1) for _ in range(24)]
    picker.news.set_endpoints([replace(first, incarnation="2"), *others], now=1.0)
    for pick in [pick for pick in picks if pick.decision.chosen == "a"]:
        picker.on_response_headers(pick, status=503, served=None, now=1.1)  # Envoy's own answer
        picker.end(pick, outcome="failed", now=1.1)
    assert not picker.news.ejected(now=1.2)
    assert not picker.fleet.failures.probes_due(now=1.2)


def test_a_probe_of_the_old_process_does_not_count_for_the_new_one() -> None:
    picker = a_picker(on=endpoints("abcd"))
    failures, server = picker.fleet.failures, state(picker, "a")
    failures.failed(server, Form.FAILS, "m", now=1.0)
    [old] = picker.fleet.failures.probes_due(now=1.0)
    failures.forget(server)
    failures.failed(server, Form.FAILS, "m", now=2.0)
    before = failures.share(server, now=2.0)
    [_] = picker.fleet.failures.probes_due(now=2.0)
    picker.fleet.failures.probed(old, "ill", now=2.0)
    assert failures.share(server, now=2.0) == before


def test_a_server_that_left_while_its_requests_hung_is_not_kept() -> None:
    servers = endpoints("ab")
    picker = a_picker(on=servers)
    picks = [picker.pick(ask(b"", stream=True), now=0.01 * n) for n in range(20)]
    for pick in picks:
        if pick.decision.chosen == "b":
            picker.on_response_headers(pick, status=200, served=None, now=0.5)
    picker.news.set_endpoints(servers[1:], now=0.6)
    picker.housekeep(now=60.0)
    check_picker(picker)


HANG_S = 2.0


class WatchedServers:
    """Servers whose pages come once a second, each with the counter of generated tokens."""

    def __init__(self) -> None:
        self.answers = Answers()

    def page(
        self,
        state: EndpointState,
        tokens: float | None,
        *,
        now: float,
        running: int = 1,
        at_end: bool = False,
        kv_usage: float = 0.5,
    ) -> Movement:
        after = EndpointMetrics(
            scraped_at=now,
            generated_tokens=tokens,
            running=running,
            waiting=0,
            counts_at_end=at_end,
            kv_usage=kv_usage,
        )
        seen = self.unread(state, after, now=now)
        state.metrics = after
        return seen

    def unread(self, state: EndpointState, after: EndpointMetrics | None = None, *, now: float) -> Movement:
        seen = self.answers.look(state, after, hang_seconds=HANG_S, now=now)
        state.picks_since_scrape = 0
        return seen

    def begin(self, state: EndpointState, *, times: int, now: float) -> None:
        for _ in range(times):
            wait = self.answers.sent(state, model="m", streams=False, now=now)
            self.answers.began(wait, well=True, now=now)


def sent_to(state: EndpointState, tokens: int = 0) -> EndpointState:
    book(state, tokens, now=0.0)
    return state


def test_open_requests_with_counters_that_stand_still_are_a_stall() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    assert [watched.page(state, 5.0, now=float(n)) for n in range(4)] == [
        "moves",  # nothing is known of the time before
        "idle",
        "stalls",  # 80 % of `hangSeconds` have passed since the first of these pages
        "stalls",
    ]
    assert watched.page(state, 6.0, now=4.0) == "moves"
    assert watched.page(state, 6.0, now=5.0) == "idle", "the time counts from the last growth"


def test_server_stalls_alone_if_counters_of_another_one_have_grown_since() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(2):
        watched.page(state, 5.0, now=float(n))
    watched.page(other, 5.0, now=1.5)
    assert watched.page(state, 5.0, now=2.0) == "stalls alone"


def test_a_server_has_twice_the_time_that_its_booked_work_should_take() -> None:
    watched, state = WatchedServers(), sent_to(a_state(), 3000)  # 3 s of work
    seen = [watched.page(state, 5.0, now=float(n)) for n in range(9)]
    assert seen.index("stalls") == 8, "0.8 * 2 s, and twice the 3 s"


def test_a_server_whose_cache_fills_computes_a_long_prompt() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    seen = [watched.page(state, 5.0, now=float(n), kv_usage=0.01 * min(n, 6)) for n in range(9)]
    assert seen == ["moves", *["idle"] * 7, "stalls"], "0.8 * 2 s after the last growth, at 6 s"


def test_a_cache_whose_use_goes_up_and_down_computes_no_prompt() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    seen = [watched.page(state, 5.0, now=float(n), kv_usage=0.1 * (n % 2)) for n in range(5)]
    assert seen == ["moves", "idle", "idle", "stalls", "stalls"]


def test_a_cache_that_fills_for_ten_minutes_computes_no_prompt() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    seen = [watched.page(state, 5.0, now=10.0 * n, kv_usage=0.001 * n) for n in range(63)]
    assert seen == ["moves", *["idle"] * 59, *["stalls"] * 3], "from 600 s on"


def test_a_server_that_is_unasked_or_waits_for_a_slow_client_is_idle() -> None:
    watched, unasked, state = WatchedServers(), a_state(), sent_to(a_state())
    assert [watched.page(unasked, 5.0, now=float(n)) for n in range(6)] == ["moves"] + ["idle"] * 5
    for n, tokens in enumerate((0.0, 0.0, 9.0)):
        watched.page(state, tokens, now=float(n))
    for n in range(3, 9):
        assert watched.page(state, 9.0, now=float(n), running=0) == "idle"


@pytest.mark.parametrize(("tokens", "at_end"), [(None, False), (5.0, True)])
def test_server_that_does_not_count_while_it_generates_is_assumed_to_work(
    tokens: float | None, *, at_end: bool
) -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    assert {watched.page(state, tokens, now=float(n), at_end=at_end) for n in range(8)} == {"moves"}
    busy, other = sent_to(a_state()), sent_to(a_state())
    waits = [watched.answers.sent(busy, model="m", streams=False, now=8.0) for _ in range(2)]
    seen = [watched.page(busy, tokens, now=8.0 + n, at_end=at_end) for n in range(4)]
    watched.begin(other, times=3, now=11.5)
    seen += [watched.page(busy, tokens, now=12.0, at_end=at_end)]
    assert seen == ["moves"] * 4 + ["may hang"], (
        "others have begun three answers since the requests were sent"
    )
    watched.answers.began(waits[0], well=True, now=12.0)
    assert {watched.page(busy, tokens, now=12.0 + n, at_end=at_end) for n in range(8)} == {"moves"}
    assert watched.page(busy, 5.0, now=20.0) == "moves", "nothing is known of the counters before"


def test_whole_answers_that_take_long_everywhere_are_no_hang() -> None:
    watched, busy, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(200):
        wait = watched.answers.sent(other, model="m", streams=False, now=float(n))
        watched.answers.began(wait, well=True, now=n + 5.0)
    for _ in range(2):
        watched.answers.sent(busy, model="m", streams=False, now=200.0)
    watched.begin(other, times=3, now=204.0)
    assert watched.page(busy, None, now=205.0) == "moves"


def test_an_old_request_that_is_not_streamed_makes_young_ones_no_hang() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    watched.answers.sent(state, model="m", streams=False, now=0.0)
    watched.begin(other, times=3, now=1.0)
    for _ in range(2):
        watched.answers.sent(state, model="m", streams=True, now=29.99)
    assert watched.page(state, 5.0, now=30.0) == "moves"


def test_quick_errors_of_another_server_make_no_slow_first_byte_a_hang() -> None:
    watched, slow, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    for n in range(200):
        wait = watched.answers.sent(slow, model="m", streams=True, now=float(n))
        watched.answers.began(wait, well=True, now=n + 2.0)
    for _ in range(200):
        wait = watched.answers.sent(other, model="m", streams=True, now=300.0)
        watched.answers.began(wait, well=False, now=300.0)
    for _ in range(2):
        watched.answers.sent(slow, model="m", streams=True, now=300.0)
    watched.begin(other, times=3, now=301.0)
    assert watched.page(slow, 5.0, now=301.9) == "moves"


def test_a_stall_is_found_although_some_pages_cannot_be_read() -> None:
    watched, state = WatchedServers(), sent_to(a_state())
    seen = [
        watched.unread(state, now=n / 2) if n % 2 else watched.page(state, 5.0, now=n / 2) for n in range(8)
    ]
    assert seen == ["moves", "idle", "idle", "idle", "stalls", "idle", "stalls", "idle"]


def test_two_streamed_answers_that_do_not_begin_are_a_hang() -> None:
    watched, state, other = WatchedServers(), sent_to(a_state()), sent_to(a_state())
    waits = [watched.answers.sent(state, model="m", streams=True, now=0.0) for _ in range(2)]
    watched.begin(other, times=3, now=1.0)
    seen = [watched.page(state, n, now=n, kv_usage=n / 10) for n in (1.0, 2.0)]
    assert seen == ["moves", "hangs"], "counters may grow, and the cache with them"
    watched.answers.left(waits[0])
    assert watched.page(state, 3.0, now=3.0) == "moves"


def send(picker: Picker, server: str, prompt: bytes = b"", *, now: float) -> Pick:
    return picker.pick(ask(prompt, subset=frozenset({ADDRESSES[server]})), now=now)


def refuse(picker: Picker, server: str, prompt: bytes = b"", *, now: float) -> None:
    pick = send(picker, server, prompt, now=now)
    picker.on_response_headers(pick, status=401, served=pick.destinations[0], now=now)
    picker.end(pick, outcome="ended", now=now)


def seen(picker: Picker, *, now: float) -> Snapshot:
    spec = picker.policy.spec
    return picker.fleet.snapshot(range(3), model="m", adapter="", spec=spec, now=now)


def test_a_refused_request_counts_for_as_long_as_an_answer_takes() -> None:
    picker = a_picker(on=endpoints("abc"))
    for server in "bc":
        for _ in range(3):
            send(picker, server, text(server), now=1.0)
    refuse(picker, "a", text("a"), now=1.0)
    assert seen(picker, now=1.01).in_flight.tolist() == [1, 3, 3]
    assert seen(picker, now=1.01).undone_tokens[0] > 0
    assert seen(picker, now=2.1).in_flight.tolist() == [0, 3, 3]  # a second is assumed, until answers tell
    assert seen(picker, now=2.1).undone_tokens[0] == 0


def test_no_server_counts_as_busier_than_the_others_by_more_than_a_request() -> None:
    picker = a_picker(on=endpoints("abc"))
    for server in "bc":
        for _ in range(3):
            send(picker, server, text(server), now=1.0)
    for _ in range(1000):
        refuse(picker, "a", text("a"), now=1.0)
    assert seen(picker, now=1.01).in_flight.tolist() == [4, 3, 3]
    undone = seen(picker, now=1.01).undone_tokens
    assert undone[0] == pytest.approx(undone[1:].mean())
