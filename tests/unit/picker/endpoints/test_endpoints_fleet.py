"""The set of endpoints: candidates, snapshots, and which cache is used when an endpoint comes back."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.base.errors import NoEndpointError
from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName, Role
from epp.config.policy import DEFAULT_POLICY, Chunks, PolicySpec, Scrape
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from epp.picker.picker import Picker
from epp.picker.scheduling.snapshot import MOST_KEPT
from tests.invariants.fleet import check_fleet
from tests.invariants.picker import check_news, check_picker
from tests.unit.picker.endpoints.fleets import SPEC, a_fleet, fail_scrapes, news_of, state_of
from tests.unit.picker.endpoints.lettered import endpoint
from tests.unit.picker.picker_questions import ask, policy_of


def test_endpoint_that_stays_keeps_its_state_even_if_its_adapters_change() -> None:
    news = news_of(endpoint("a", model="m"))
    before = state_of(news.fleet, "a")
    news.set_endpoints([endpoint("a", model="m", adapters=("sql",))], now=1.0)
    assert news.fleet.get(EndpointName("a")) is before
    assert before.endpoint.adapters == {"sql"}
    assert before.process == 0


def test_an_endpoint_that_serves_another_model_is_another_server() -> None:
    news = news_of(endpoint("a", model="m"), endpoint("b", model="other"))
    state, other = news.fleet.states()
    news.set_endpoints([endpoint("a", model="other"), endpoint("b", model="other")], now=1.0)
    assert (state.process, other.process) == (1, 0)
    check_news(news)


LISTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.sampled_from(["", "1"])),
        unique_by=(lambda e: e[0], lambda e: e[1]),
    ),
    max_size=8,
)


@pytest.mark.slow
@given(LISTS)
def test_the_fleet_is_always_exactly_the_last_list(lists: list[list[tuple[str, int, str]]]) -> None:
    news, known = news_of(), dict[EndpointName, EndpointState]()
    for listed in lists:
        wanted = [endpoint(n, host=f"10.0.0.{host}", incarnation=i) for n, host, i in listed]
        before = {name: (state.endpoint, state.process) for name, state in known.items()}
        news.set_endpoints(wanted, now=0.0)
        states = {state.endpoint.name: state for state in news.fleet.states()}
        assert {name: state.endpoint for name, state in states.items()} == {e.name: e for e in wanted}
        for name, state in states.items():
            if name in known:
                old, process = before[name]
                assert known[name] is state
                assert state.process - process == (old.process != state.endpoint.process)
            assert news.fleet.at(state.endpoint.address) is state
            state.book(Booking(tokens=5, booked_at=0.0), now=0.0)
        assert all(state.gone == (name not in states) for name, state in known.items())
        known = states
        check_news(news)


def names_serving(fleet: Fleet, model: str) -> list[str]:
    return sorted(fleet.states()[slot].endpoint.name for slot in fleet.served.slots(model))


def holds(fleet: Fleet, name: str, adapter: str) -> None:
    page = EndpointMetrics(scraped_at=1.0, active_adapters=frozenset({adapter}))
    state_of(fleet, name).take_page(page, now=1.0)


def test_a_declared_adapter_is_also_served_where_it_was_loaded_at_run_time() -> None:
    fleet = a_fleet(
        endpoint("a", model="m", adapters=["x"]), endpoint("b", model="m"), endpoint("c", model="m")
    )
    holds(fleet, "b", "x")
    assert names_serving(fleet, "x") == ["a", "b"]


def test_a_base_model_is_not_taken_for_an_adapter() -> None:
    fleet = a_fleet(endpoint("a", model="m", adapters=["x"]))
    assert fleet.served.adapter("m") == ""
    assert fleet.served.adapter("x") == "x"
    assert fleet.served.adapter("never-heard-of") == ""


def test_a_snapshot_does_not_change_after_it_was_made() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"))
    state = state_of(fleet, "a")
    state.take_page(EndpointMetrics(scraped_at=0.0, running=3, waiting=2, kv_usage=0.5), now=0.0)
    before = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=0.0)
    state.book(Booking(tokens=500, booked_at=0.0), now=0.0)
    state.take_page(EndpointMetrics(scraped_at=1.0, running=9, waiting=9, kv_usage=0.9), now=1.0)
    after = fleet.snapshot([0, 1], model="m", adapter="", spec=SPEC, now=1.0)
    assert (before.in_flight[0], before.waiting[0], before.kv_usage[0]) == (5, 2, 0.5)
    assert (after.in_flight[0], after.waiting[0], after.kv_usage[0]) == (18, 9, 0.9)


def test_unknown_and_stale_numbers_are_nan() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    a, b, c = fleet.states()
    a.take_page(EndpointMetrics(scraped_at=0.0, running=7, waiting=2, kv_usage=0.5), now=0.0)
    b.take_page(EndpointMetrics(scraped_at=9.0, running=3, waiting=1), now=9.0)
    for state in (a, b, c):
        state.book(Booking(tokens=5, booked_at=9.0), now=9.0)
    seen = fleet.snapshot(range(3), model="m", adapter="", spec=SPEC, now=10.0)
    assert seen.in_flight.tolist() == [1, 5, 1], "only the second page is fresh"
    np.testing.assert_equal(seen.waiting, [np.nan, 1, np.nan])
    np.testing.assert_equal(seen.kv_usage, [np.nan, np.nan, np.nan])
    patient = structs.replace(SPEC, scrape=Scrape(stale_after_seconds=10.0))
    seen = fleet.snapshot(range(3), model="m", adapter="", spec=patient, now=10.0)
    assert seen.in_flight.tolist() == [10, 5, 1], "the policy says how old a page may be"


def test_a_snapshot_of_some_slots_has_their_numbers_in_the_order_asked_for() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    for tokens, state in zip((100, 200, 300), fleet.states(), strict=True):
        state.book(Booking(tokens=tokens, booked_at=0.0), now=0.0)
    seen = fleet.snapshot([2, 0], model="m", adapter="", spec=SPEC, now=0.0)
    assert (list(seen.slots), seen.undone_tokens.tolist()) == ([2, 0], [300, 100])
    assert fleet.columns.block_tokens[seen.at].tolist() == [1, 1]


def test_snapshot_shows_which_endpoints_hold_the_adapter_or_have_free_slot() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    a, b, _ = fleet.states()
    a.use_adapter("x", most=2, now=0.0)
    b.take_page(EndpointMetrics(scraped_at=0.0, max_lora=1, loaded_adapters=frozenset({"y"})), now=0.0)
    seen = fleet.snapshot(range(3), model="x", adapter="x", spec=SPEC, now=0.0)
    assert seen.has_adapter is not None
    assert seen.free_slot is not None
    assert (seen.has_adapter.tolist(), seen.free_slot.tolist()) == ([True, False, False], [True, False, True])
    assert fleet.snapshot(range(3), model="m", adapter="", spec=SPEC, now=0.0).has_adapter is None


def test_only_endpoints_at_the_allowed_addresses_are_candidates() -> None:
    fleet = a_fleet(endpoint("a"), endpoint("b"), endpoint("c"))
    allowed = {endpoint("c").address, endpoint("a").address, endpoint("z").address}
    assert fleet.candidates("m", subset=allowed) == ([0, 2], "")
    front = Address("10.1.1.1", 80)
    ranks = [replace(endpoint(name), rank=n, behind=front) for n, name in enumerate("ab")]
    ranked = a_fleet(*ranks, endpoint("c"))
    assert ranked.candidates("m", subset={front}) == ([0, 1], "")
    with pytest.raises(NoEndpointError) as raised:
        ranked.candidates("m", subset={ranks[0].address})
    assert raised.value.reason == "subset_empty", "the data plane knows the ranks by their front"


def test_endpoints_that_answer_are_candidates() -> None:
    fleet = a_fleet(
        replace(endpoint("p"), role=Role.PREFILL),
        replace(endpoint("d"), role=Role.DECODE),
        replace(endpoint("b"), role=Role.BOTH),
    )
    assert fleet.prefilling == [0, 2]
    assert (fleet.candidates("m", subset=None)[0], fleet.prefillers("m", subset=None)) == ([1, 2], [0, 2])
    fail_scrapes(fleet, "p")
    assert fleet.prefillers("m", subset=None) == [2]
    assert fleet.prefillers("m", subset={endpoint("d").address}) == []
    assert not a_fleet(endpoint("a")).prefilling


EVENTS = st.sampled_from(
    ["book", "end", "detach", "page", "fail", "adapter", "expect", "settle", "restart", "leave"]
)


@pytest.mark.slow
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=40))
def test_after_any_events_the_columns_agree_with_the_states(events: list[tuple[str, int]]) -> None:
    news, now = news_of(*map(endpoint, "abcd")), 0.0
    fleet = news.fleet
    held: dict[EndpointState, list[Booking]] = {state: [] for state in fleet.states()}
    for event, number in events:
        now += 0.5
        state = fleet.states()[number % len(fleet.states())]
        if event == "book":
            held[state].append(Booking(tokens=100 * number, booked_at=now))
            state.book(held[state][-1], now=now)
        elif event == "end" and held[state]:
            state.release(held[state].pop(), computed=number > 1, now=now)
        elif event == "detach" and held[state]:
            held[state].pop()
            state.detach()
        elif event == "page":
            page = EndpointMetrics(
                scraped_at=now,
                running=number,
                waiting=number,
                prompt_tokens=50 * now,
                loaded_adapters=frozenset("xyz"[:number]),
            )
            state.take_page(page, now=now)
        elif event == "fail":
            state.scrape_failed(now=now)
        elif event == "adapter":
            state.use_adapter("wxyz"[number], most=2, now=now)
        elif event == "expect":
            state.expect_adapter("wxyz"[number])
        elif event == "settle" and state.expected_adapters:
            state.settle_adapter(next(iter(state.expected_adapters)))
        elif event == "restart":
            state.forget_server(now=now)
        elif event == "leave" and len(fleet.states()) > 1:
            news.set_endpoints([s.endpoint for s in fleet.states() if s is not state], now=now)
        assert state.loads[0] >= state.in_flight == len(held[state])
        check_fleet(fleet)


A = EndpointName("a:8000")


def process_of_a(*, incarnation: str = "uid/1", host: str = "10.0.0.1", model: str = "") -> Endpoint:
    return Endpoint(A, Address(host, 8000), model=model, incarnation=incarnation)


def warm_picker(of: Endpoint) -> tuple[Picker, int]:
    """Return a picker with one endpoint, whose cache is much larger than the default, and the number of its
    entries.
    """
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    picker.news.set_endpoints([of], now=0.0)
    picker.news.observe(A, EndpointMetrics(scraped_at=0.0, capacity_tokens=10**7), now=0.0)
    for n in range(40):
        prompt = random.Random(n).randbytes(20_000).hex().encode()
        pick = picker.pick(ask(prompt), now=0.0)
        picker.on_response_headers(pick, status=200, served=None, now=0.0)
    entries = picker.caches.table.mirrors[A].entries
    assert picker.caches.table.mirrors[A].used_bytes > 10**6 > 0 < entries
    return picker, entries


def leave_and_return(of: Endpoint, *, as_: Endpoint, away_s: float = 5.0) -> tuple[Picker, int]:
    """Let the endpoint leave and come back as `as_`. Return the number of its entries."""
    picker, entries = warm_picker(of)
    picker.news.set_endpoints([], now=0.0)
    picker.housekeep(now=away_s)
    picker.news.set_endpoints([as_], now=away_s)
    check_picker(picker)
    return picker, entries


def test_the_same_process_that_was_not_ready_for_a_moment_is_still_warm() -> None:
    picker, entries = leave_and_return(process_of_a(), as_=process_of_a())
    assert picker.caches.table.mirrors[A].entries == entries
    picker.housekeep(now=1000.0)
    assert picker.caches.table.mirrors[A].entries == entries, "the endpoint is back, so nobody waits for it"


@pytest.mark.parametrize(
    "other",
    [process_of_a(incarnation="uid/2"), process_of_a(host="10.0.0.2"), process_of_a(model="another")],
    ids=["restarted", "moved", "another model"],
)
def test_another_process_of_the_same_name_is_cold(other: Endpoint) -> None:
    picker, _ = leave_and_return(process_of_a(), as_=other)
    assert picker.caches.table.mirrors[A].entries == 0


def test_an_endpoint_that_stays_away_is_forgotten() -> None:
    picker, _ = leave_and_return(process_of_a(), as_=process_of_a(), away_s=60.0)
    assert picker.caches.table.mirrors[A].entries == 0
    picker, _ = warm_picker(process_of_a())
    picker.news.set_endpoints([], now=0.0)
    picker.housekeep(now=60.0)
    assert picker.caches.table.entries == 0
    assert list(picker.caches.table.mirrors) == []


def test_an_endpoint_without_an_incarnation_comes_back_cold() -> None:
    picker, _ = leave_and_return(process_of_a(incarnation=""), as_=process_of_a(incarnation=""))
    assert picker.caches.table.mirrors[A].entries == 0


def test_endpoint_that_left_is_forgotten_if_policy_cuts_chunks_differently() -> None:
    picker, _ = warm_picker(process_of_a())
    picker.news.set_endpoints([], now=0.0)
    spec = PolicySpec(chunks=Chunks(size_bytes=128))
    picker.set_policy(policy_of(spec))
    picker.news.set_endpoints([process_of_a()], now=2.0)
    assert picker.caches.table.mirrors[A].entries == 0
    check_picker(picker)


def test_no_more_endpoints_than_a_bound_are_remembered() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    many = [
        Endpoint(EndpointName(f"e{n}"), Address("10.0.0.1", n), incarnation="uid") for n in range(1, 4100)
    ]
    picker.news.set_endpoints(many, now=0.0)
    picker.news.set_endpoints([], now=1.0)
    assert len(picker.caches.table.mirrors) == MOST_KEPT < len(many)
