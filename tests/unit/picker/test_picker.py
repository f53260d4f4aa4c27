"""The picker's choice by prefixes, candidates and load; its events; data parallel ranks."""

from dataclasses import replace
from typing import get_args

import pytest

from epp.base.errors import NoEndpointError, SaturatedError
from epp.base.types import (
    RANK,
    RANK_ADDRESS,
    Address,
    ApiKind,
    Endpoint,
    EndpointMetrics,
    EndpointName,
    ModelCard,
    ModelList,
)
from epp.config.policy import LoadSettings, PolicySpec, RuleName
from epp.picker.decision import Question
from epp.picker.events import (
    Answered,
    Began,
    Ended,
    Moved,
    Pick,
    PickerEvent,
    Proved,
    Restarted,
    TimedEvent,
)
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from epp.serve.envoy.files import render_endpoints
from epp.sources.scraping.metrics_page import parse_page
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import (
    ADDRESSES,
    ELSEWHERE,
    A,
    B,
    C,
    a_picker,
    ask,
    endpoints,
    in_flight,
    serve,
    state,
    text,
    undone,
)
from tests.unit.sources.scraping.engine_pages import PAGES, idle

# -- prefixes ------------------------------------------------------------------------------------------------


def test_predicted_cached_tokens_are_whole_blocks_and_never_whole_prompt() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, block_size=16), now=0.5)
    # 2,048 tokens are 128 blocks. Only whole chunks and whole blocks count.
    serve(picker, ask(text("p", 8192)), now=1.0)
    assert picker.pick(ask(text("p", 8192)), now=2.0).decision.matched_tokens == 2032


def test_token_ids_count_four_bytes_to_a_token() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("ids", 8000), token_ids=True), now=1.0)
    picker.on_feedback(  # a different ratio for text must not matter
        serve(picker, ask(text("t", 8000)), now=2.0), ResponseFeedback(prompt_tokens=8000), now=2.6
    )
    again = picker.pick(ask(text("ids", 8000), token_ids=True), now=3.0).decision
    assert again.prompt_tokens == 2000
    assert 2000 - 64 <= again.matched_tokens < 2000


def test_a_body_that_could_not_be_read_counts_by_its_size() -> None:
    picker = a_picker()
    decision = picker.pick(ask(model="", kind=ApiKind.OTHER, body_bytes=4000), now=1.0).decision
    assert decision.prompt_tokens == 1000
    assert decision.prompt_chunks == 0
    assert decision.reason == "load"


# -- allowed endpoints ---------------------------------------------------------------------------------------


def test_a_call_that_computes_no_tokens_books_none() -> None:
    picker = a_picker(on=endpoints("a"))
    pick = picker.pick(ask(kind=ApiKind.QUERY, body_bytes=400_000), now=1.0)
    assert (pick.decision.prompt_tokens, undone(picker, "a", now=1.0)) == (0, 0)


def test_a_new_server_is_out_after_a_failed_scrape_if_it_is_not_the_only() -> None:
    picker = a_picker(on=[*endpoints("a", model="m"), *endpoints("bc", model="n")])
    for second in range(3):
        assert picker.pick(ask(model="m"), now=4.0).destinations == (A,)
        picker.news.observe(EndpointName("a"), None, now=float(second))
    with pytest.raises(NoEndpointError):
        picker.pick(ask(model="m"), now=4.0)
    picker.news.observe(EndpointName("b"), None, now=1.0)
    assert picker.pick(ask(model="n"), now=4.0).destinations == (C,)


@pytest.mark.parametrize("rule", get_args(RuleName))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_fallback_list_has_two_endpoints_or_more_and_no_duplicates(rule: RuleName, count: int) -> None:
    picker = a_picker(PolicySpec(rule=rule), on=endpoints("abcd"[:count], model="m", adapters=["x"]))
    for number in range(40):
        model = "x" if number % 3 == 0 else "m"
        pick = picker.pick(ask(text(f"p{number % 5}"), model=model, session=f"s{number}"), now=float(number))
        assert len(pick.destinations) == min(3, count)
        assert len(set(pick.destinations)) == len(pick.destinations)
        assert pick.decision.chosen == next(n for n in ADDRESSES if ADDRESSES[n] == pick.destinations[0])


def test_prescribed_endpoints_are_taken_in_their_order_once_each() -> None:
    pick = a_picker().pick(ask(text("p"), prescribed=(C, A, C, ELSEWHERE)), now=1.0)
    assert pick.destinations == (C, A)
    assert pick.decision.reason == "prescribed"


# -- load ----------------------------------------------------------------------------------------------------


def saturate(picker: Picker, *, now: float) -> None:
    for name in "abcd":
        picker.news.observe(EndpointName(name), EndpointMetrics(scraped_at=now, waiting=1000), now=now)


@pytest.mark.parametrize("rule", get_args(RuleName))
def test_a_policy_may_refuse_requests_when_all_endpoints_are_saturated(rule: RuleName) -> None:
    picker = a_picker(
        PolicySpec(rule=rule, load=LoadSettings(when_saturated="Reject", retry_after_seconds=7))
    )
    saturate(picker, now=1.0)
    with pytest.raises(SaturatedError) as caught:
        picker.pick(ask(text("p")), now=1.0)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 7)
    assert in_flight(picker) == {}
    assert picker.caches.table.entries == 0


def test_two_names_of_one_model_share_a_prefix_and_an_adapter_does_not() -> None:
    cards = (ModelCard("a", root="/m"), ModelCard("b", root="/m"), ModelCard("lora", parent="a"))
    picker = a_picker()
    picker.news.take_lists({EndpointName(name): ModelList(cards) for name in "abcd"}, now=0.0)
    serve(picker, ask(text("p"), model="a"), now=1.0)
    times = {"lora": 10.0, "b": 20.0, "": 30.0}
    matched = [
        serve(picker, ask(text("p"), model=m), now=at).decision.matched_tokens for m, at in times.items()
    ]
    assert matched == [0, matched[1], matched[1]]
    assert matched[1] > 1900


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_leaves_no_server_out_and_no_work_behind(jump_s: float) -> None:
    picker, now, begun = a_picker(on=endpoints("ab")), 10_000.0, []
    for second in range(40):
        now += 1.0 if second != 20 else jump_s
        for name in "ab":
            page = EndpointMetrics(scraped_at=now, running=1, generated_tokens=second, finished=second)
            picker.news.observe(EndpointName(name), page, now=now)
        picker.housekeep(now=now)
        begun.append(picker.pick(ask(text(f"{second % 5}"), stream=True), now=now))
        if len(begun) > 3:
            pick = begun.pop(0)
            picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
            picker.end(pick, outcome="ended", now=now)
        check_picker(picker)
        assert not picker.news.ejected(now=now)
    assert min(pick.decision.matched_tokens for pick in begun) > 1900
    assert sum(undone(picker, name, now=now) for name in "ab") < 100


@pytest.mark.parametrize("at_once", [1, 16])
def test_engines_of_every_kind_get_their_fair_share_of_one_pool(at_once: int) -> None:
    """Two vLLM servers, one of each other engine, and two without numbers: the page `[]`, and none."""
    vllm = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    others = [idle(page) for page, _ in PAGES.values()]
    pages = dict(zip("abcdefghi", (vllm, vllm, *others, b"", b""), strict=True))
    picker, counts, begun = a_picker(on=endpoints("".join(pages))), dict.fromkeys(pages, 0), list[Pick]()
    for number in range(900):
        now = 1.0 + number / 20
        for name, page in pages.items() if number % 20 == 0 else ():
            read = parse_page(page, scraped_at=now) if page else EndpointMetrics(scraped_at=now)
            if read.running is not None:
                read = replace(read, running=in_flight(picker).get(name, 0))
            picker.news.observe(EndpointName(name), read, now=now)
        if len(begun) == at_once:
            done = begun.pop(0)
            picker.on_response_headers(done, status=200, served=done.destinations[0], now=now)
            picker.end(done, outcome="ended", now=now + 0.005)
            assert done.guess.proven or pages[done.decision.chosen]
        begun.append(picker.pick(ask(text(f"p{number}"), stream=True), now=now))
        counts[begun[-1].decision.chosen] += 1
    assert not picker.fleet.failures.probes_due(now=now)
    assert all(75 < count < 125 for count in counts.values()), counts


def heard_picker() -> tuple[Picker, list[PickerEvent]]:
    picker = a_picker(on=endpoints("ab"))
    events: list[PickerEvent] = []
    picker.subscribe(events.append)
    return picker, events


LONG = ask(b"x" * 1000, stream=True)


def time_of(event: PickerEvent) -> float:
    assert isinstance(event, TimedEvent), "events of a stream have no time"
    return event.at


def test_a_request_sends_events_when_it_begins_moves_is_answered_and_ends() -> None:
    picker, events = heard_picker()
    pick = picker.pick(LONG, now=1.0)
    elsewhere = B if pick.destinations[0] == A else A
    picker.on_response_headers(pick, status=200, served=elsewhere, now=2.0)
    picker.end(pick, outcome="ended", now=3.0)
    picker.end(pick, outcome="ended", now=4.0)
    assert [(type(event), time_of(event)) for event in events] == [
        (Began, 1.0),
        (Moved, 2.0),
        (Proved, 2.0),
        (Answered, 2.0),
        (Ended, 3.0),
    ]
    of_requests = [event for event in events if isinstance(event, Began | Moved | Answered | Ended)]
    assert {id(event.pick) for event in of_requests} == {id(pick)}
    assert isinstance(events[3], Answered)
    assert events[3].mismatch


@pytest.mark.parametrize(("status", "fault"), [(200, False), (404, False), (429, True), (503, True)])
def test_a_fault_is_known_with_the_first_event_of_the_answer(status: int, fault: bool) -> None:  # noqa: FBT001 - a row
    picker, _ = heard_picker()
    failed: list[tuple[type[PickerEvent], bool]] = []

    def note(event: PickerEvent) -> None:
        if isinstance(event, Began | Moved | Answered):
            failed.append((type(event), event.pick.failed))

    picker.subscribe(note)
    pick = picker.pick(LONG, now=1.0)
    elsewhere = B if pick.destinations[0] == A else A
    picker.on_response_headers(pick, status=status, served=elsewhere, now=2.0)
    assert failed == [(Began, False), (Moved, fault), (Answered, fault)]
    again = picker.pick(LONG, now=2.1).decision
    assert (again.matched_tokens > 0) == (status == 200), "before the answer's end"
    share = picker.fleet.failures.share(state(picker, pick.decision.chosen), now=2.1)
    assert share > 0, "a retry counts against the first choice"


def test_only_a_restart_seen_in_counters_sends_an_event() -> None:
    picker, events = heard_picker()
    name = EndpointName("a")
    picker.news.observe(name, EndpointMetrics(scraped_at=1.0, prompt_tokens=500.0, finished=5.0), now=1.0)
    picker.news.observe(name, EndpointMetrics(scraped_at=2.0, prompt_tokens=10.0, finished=0.0), now=2.0)
    assert [(type(event), time_of(event)) for event in events] == [(Restarted, 2.0)]
    state = picker.fleet.get(name)
    assert state is not None
    assert state.cold_at == 2.0
    picker.news.set_endpoints([Endpoint(name, A, incarnation="2")], now=3.0)
    assert len(events) == 1
    assert state.cold_at == 3.0


FRONT, OTHER = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000)


def ranks() -> list[Endpoint]:
    """Return two servers of two ranks each."""
    return [
        Endpoint(EndpointName(f"{front.host}/{n}"), Address(front.host, 8001 + n), rank=n, behind=front)
        for front in (FRONT, OTHER)
        for n in (0, 1)
    ]


@pytest.mark.parametrize("overload", [False, True])
def test_the_front_is_the_destination_and_the_headers_name_the_rank(overload: bool) -> None:  # noqa: FBT001
    picker = a_picker(on=ranks())
    pick = picker.pick(Question("r", ask(text("p")).inference, overload=overload), now=1.0)
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
    picker.on_response_headers(first, status=200, served=first.destinations[0], now=9.6)
    assert first.state.endpoint.name == first.decision.chosen


def test_the_file_for_envoy_has_only_fronts() -> None:
    rendered = render_endpoints(ranks())
    assert rendered.count(b'"address": "10.0.0.1"') == 1
    assert b"8001" not in rendered
