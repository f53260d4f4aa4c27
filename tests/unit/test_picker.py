"""The picker as its callers see it: what is chosen, what is booked, and what is remembered of each event."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import get_args

import pytest

from epp.decision import Pick, PickRequest
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError, SaturatedError
from epp.picker import Outcome, Picker
from epp.policy import (
    API_VERSION,
    KIND,
    Chunks,
    Gain,
    Load,
    Metadata,
    Policy,
    PolicySpec,
    RuleName,
    Sampling,
    Table,
)
from epp.request.response import ResponseFeedback
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest

A, B, C, D = (Address(f"10.0.0.{i}", 8000) for i in (1, 2, 3, 4))
ADDRESSES = {"a": A, "b": B, "c": C, "d": D}
ELSEWHERE = Address("10.9.9.9", 8000)


def endpoints(names: str, *, model: str = "", adapters: Sequence[str] = ()) -> list[Endpoint]:
    return [Endpoint(EndpointName(n), ADDRESSES[n], model=model, adapters=frozenset(adapters)) for n in names]


def policy_of(spec: PolicySpec) -> Policy:
    return Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="test"), spec=spec)


def a_picker(spec: PolicySpec = PolicySpec(), *, on: Sequence[Endpoint] = (), seed: int = 0) -> Picker:  # noqa: B008 - frozen
    picker = Picker(policy_of(spec), rng=random.Random(seed), unix_offset_s=1000.0)
    picker.set_endpoints(on or endpoints("abcd"), now=0.0)
    return picker


def text(name: str, size: int = 8000) -> bytes:
    """Another text for every name, of exactly `size` bytes."""
    return random.Random(name).randbytes(size // 2).hex().encode() + b"." * (size % 2)


def ask(
    prompt: bytes = b"",
    *,
    model: str = "m",
    salt: str = "",
    stream: bool = False,
    kind: ApiKind = ApiKind.COMPLETIONS,
    token_ids: bool = False,
    subset: frozenset[Address] | None = None,
    prescribed: tuple[Address, ...] = (),
    session: str = "",
    body_bytes: int = 0,
) -> PickRequest:
    inference = InferenceRequest(
        kind=kind, model=model, prompt=prompt, cache_salt=salt, stream=stream, token_ids=token_ids
    )
    return PickRequest(
        request_id="r",
        inference=inference,
        body_bytes=body_bytes,
        subset=subset,
        session=session,
        prescribed=prescribed,
    )


def serve(picker: Picker, request: PickRequest, *, now: float, status: int = 200) -> Pick:
    """One request from its pick to its end, half a second later."""
    pick = picker.pick(request, now=now)
    picker.on_response_headers(pick, status=status, served=pick.destinations[0], now=now + 0.4)
    picker.end(pick, outcome="ended", now=now + 0.5)
    check(picker)
    return pick


def check(picker: Picker) -> None:
    picker.fleet.check_integrity()
    picker.table.check_integrity()


def state(picker: Picker, name: str) -> EndpointState:
    found = picker.fleet.get(EndpointName(name))
    assert found is not None
    return found


def in_flight(picker: Picker) -> dict[str, int]:
    return {s.endpoint.name: s.in_flight for s in picker.fleet.states() if s.in_flight}


def undone(picker: Picker, name: str, *, now: float) -> float:
    found = state(picker, name)
    return found.backlog.undone_tokens(now=now, rate=found.rate.tokens_per_s)


def held_bytes(picker: Picker, name: str) -> int:
    return picker.table.used_bytes(EndpointName(name))


# -- prefixes ----------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_goes_where_it_was_and_nearly_all_of_it_is_predicted_cached() -> None:
    picker = a_picker()
    first = serve(picker, ask(text("p")), now=1.0)
    second = picker.pick(ask(text("p")), now=2.0)
    assert second.destinations[0] == first.destinations[0]
    assert second.decision.reason == "prefix"
    assert second.decision.prompt_tokens == 2000
    assert 2000 - 64 <= second.decision.matched_tokens < 2000  # less at most one chunk of 256 bytes
    assert undone(picker, second.decision.chosen, now=2.0) == 2000 - second.decision.matched_tokens


def test_a_prompt_is_never_predicted_cached_to_its_last_token_and_only_in_whole_blocks() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, block_size=16), now=0.5)
    serve(
        picker, ask(text("p", 8192)), now=1.0
    )  # 2,048 tokens, 128 blocks: whole chunks and blocks all through
    assert picker.pick(ask(text("p", 8192)), now=2.0).decision.matched_tokens == 2032


def test_a_shared_beginning_counts_as_far_as_it_is_shared() -> None:
    picker = a_picker()
    serve(picker, ask(text("system", 4096) + text("one", 4000)), now=1.0)
    second = picker.pick(ask(text("system", 4096) + text("two", 4000)), now=2.0)
    assert second.decision.matched_tokens == 1024


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ask(text("p"), salt="one"), ask(text("p"), salt="two")),
        (ask(text("p"), salt=""), ask(text("p"), salt="two")),
        (ask(text("p"), model="x"), ask(text("p"), model="y")),
        (ask(text("p"), model="m"), ask(text("p"), model="x")),
    ],
)
def test_salts_models_and_adapters_never_share_a_prefix(first: PickRequest, second: PickRequest) -> None:
    picker = a_picker(on=endpoints("abcd", model="m", adapters=["x", "y"]))
    serve(picker, first, now=1.0)
    assert picker.pick(second, now=2.0).decision.matched_tokens == 0
    assert picker.pick(first, now=3.0).decision.matched_tokens > 1900


def test_token_ids_count_four_bytes_to_a_token() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("ids", 8000), token_ids=True), now=1.0)
    picker.on_feedback(  # another ratio for text must not matter
        serve(picker, ask(text("t", 8000)), now=2.0), ResponseFeedback(prompt_tokens=8000), now=2.6
    )
    again = picker.pick(ask(text("ids", 8000), token_ids=True), now=3.0).decision
    assert again.prompt_tokens == 2000
    assert 2000 - 64 <= again.matched_tokens < 2000


def test_a_match_under_the_gain_threshold_is_ignored_but_still_booked_as_cached() -> None:
    spec = PolicySpec(gain=Gain(min_match_ratio=0.5))
    picker = a_picker(spec)
    warm = serve(picker, ask(text("system", 1024) + text("one", 7000)), now=1.0).decision.chosen
    picker.observe(
        warm, EndpointMetrics(scraped_at=1.5, running=1), now=1.5
    )  # the others are a little lighter
    second = picker.pick(ask(text("system", 1024) + text("two", 7000)), now=2.0).decision
    assert second.chosen != warm
    assert second.reason == "load"
    assert next(c for c in second.candidates if c.name == warm).matched_tokens == 256


def test_a_body_that_could_not_be_read_counts_by_its_size() -> None:
    picker = a_picker()
    decision = picker.pick(ask(model="", kind=ApiKind.OTHER, body_bytes=4000), now=1.0).decision
    assert decision.prompt_tokens == 1000
    assert decision.prompt_chunks == 0
    assert decision.reason == "load"


# -- who may be picked -------------------------------------------------------------------------------------------


def test_no_endpoints_is_a_503_and_nothing_is_booked() -> None:
    picker = a_picker()
    picker.set_endpoints([], now=0.5)
    with pytest.raises(NoEndpointError) as caught:
        picker.pick(ask(text("p")), now=1.0)
    assert (caught.value.status, caught.value.reason) == (503, "no_ready_endpoint")


def test_only_the_subset_is_chosen_from_also_for_the_fallback() -> None:
    picker = a_picker()
    for _ in range(30):
        pick = picker.pick(ask(text("p"), subset=frozenset({B, C})), now=1.0)
        assert set(pick.destinations) == {B, C}


def test_a_subset_is_compared_with_its_port() -> None:
    picker = a_picker()
    other_port = frozenset({Address(A.host, 9000)})
    with pytest.raises(NoEndpointError) as caught:
        picker.pick(ask(text("p"), subset=other_port), now=1.0)
    assert caught.value.reason == "subset_empty"
    assert in_flight(picker) == {}


def test_an_empty_subset_allows_nobody() -> None:
    with pytest.raises(NoEndpointError):
        a_picker().pick(ask(text("p"), subset=frozenset()), now=1.0)


def test_an_ipv6_endpoint_is_found_in_a_subset() -> None:
    six = Endpoint(EndpointName("six"), Address.parse("[fd00::6]:8000"))
    picker = a_picker(on=[*endpoints("ab"), six])
    pick = picker.pick(ask(subset=frozenset({Address.parse("[FD00:0::6]:8000")})), now=1.0)
    assert pick.destinations == (six.address,)


def test_a_model_goes_only_to_its_servers() -> None:
    picker = a_picker(on=[*endpoints("ab", model="m"), *endpoints("cd", model="n")])
    for _ in range(20):
        assert set(picker.pick(ask(model="n"), now=1.0).destinations) == {C, D}


def test_a_models_only_server_that_is_down_is_a_503_not_another_model() -> None:
    picker = a_picker(on=[*endpoints("a", model="m"), *endpoints("b", model="n")])
    for second in range(3):
        picker.observe(EndpointName("a"), None, now=float(second))
    with pytest.raises(NoEndpointError):
        picker.pick(ask(model="m"), now=4.0)
    assert picker.pick(ask(model="n"), now=4.0).destinations == (B,)


def test_an_endpoint_leaves_after_failed_scrapes_and_returns_with_a_good_one() -> None:
    picker = a_picker(on=endpoints("ab"))
    for second in range(3):
        assert len(picker.pick(ask(), now=float(second)).destinations) == 2
        picker.observe(EndpointName("a"), None, now=float(second))
    assert picker.pick(ask(), now=4.0).destinations == (B,)
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=5.0), now=5.0)
    assert set(picker.pick(ask(), now=5.0).destinations) == {A, B}


def test_when_all_scrapes_fail_all_endpoints_stay() -> None:
    picker = a_picker()
    for name in "abcd":
        for _ in range(10):
            picker.observe(EndpointName(name), None, now=1.0)
    chosen = {picker.pick(ask(), now=2.0).destinations[0] for _ in range(60)}
    assert chosen == {A, B, C, D}


@pytest.mark.parametrize("rule", get_args(RuleName))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_fallback_list_has_two_or_more_where_there_are_two_and_no_duplicates(
    rule: RuleName, count: int
) -> None:
    picker = a_picker(PolicySpec(rule=rule), on=endpoints("abcd"[:count], model="m", adapters=["x"]))
    for number in range(40):
        model = "x" if number % 3 == 0 else "m"
        pick = picker.pick(ask(text(f"p{number % 5}"), model=model, session=f"s{number}"), now=float(number))
        assert len(pick.destinations) == min(3, count)
        assert len(set(pick.destinations)) == len(pick.destinations)
        assert pick.decision.chosen == next(n for n in ADDRESSES if ADDRESSES[n] == pick.destinations[0])


def test_endpoints_left_out_by_load_are_still_a_fallback() -> None:
    picker = a_picker(on=endpoints("ab"))
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=1.0, waiting=1000), now=1.0)
    pick = picker.pick(ask(), now=1.5)
    assert pick.destinations == (B, A)
    assert [c.excluded for c in pick.decision.candidates] == ["", "waiting"]


def test_prescribed_endpoints_are_taken_in_their_order_once_each() -> None:
    pick = a_picker().pick(ask(text("p"), prescribed=(C, A, C, ELSEWHERE)), now=1.0)
    assert pick.destinations == (C, A)
    assert pick.decision.reason == "prescribed"


def test_prescribed_endpoints_that_do_not_exist_are_a_503() -> None:
    picker = a_picker()
    with pytest.raises(NoEndpointError):
        picker.pick(ask(text("p"), prescribed=(ELSEWHERE,)), now=1.0)
    assert in_flight(picker) == {}


# -- load --------------------------------------------------------------------------------------------------------


def saturate(picker: Picker, *, now: float) -> None:
    for name in "abcd":
        picker.observe(EndpointName(name), EndpointMetrics(scraped_at=now, waiting=1000), now=now)


def test_saturated_endpoints_are_still_used_by_default() -> None:
    picker = a_picker()
    saturate(picker, now=1.0)
    assert picker.pick(ask(text("p")), now=1.0).decision.reason == "saturated"


@pytest.mark.parametrize("rule", get_args(RuleName))
def test_a_policy_may_refuse_when_all_are_saturated(rule: RuleName) -> None:
    picker = a_picker(PolicySpec(rule=rule, load=Load(when_saturated="Reject", retry_after_seconds=7)))
    saturate(picker, now=1.0)
    with pytest.raises(SaturatedError) as caught:
        picker.pick(ask(text("p")), now=1.0)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 7)
    assert in_flight(picker) == {}
    assert len(picker.table) == 0


def test_saturation_is_forgotten_when_the_metrics_are_stale() -> None:
    picker = a_picker(PolicySpec(load=Load(when_saturated="Reject")))
    saturate(picker, now=1.0)
    assert picker.pick(ask(text("p")), now=7.0).decision.reason == "load"


def test_a_burst_of_one_prompt_is_shared_out_though_nothing_has_been_scraped() -> None:
    picker = a_picker()
    for _ in range(400):
        picker.pick(ask(text("hot")), now=1.0)
    loads = in_flight(picker)
    assert set(loads) == set("abcd")
    assert max(loads.values()) - min(loads.values()) < 40


def test_unlike_prompts_are_spread_evenly_by_their_tokens() -> None:
    picker = a_picker()
    rng = random.Random(5)
    for number in range(200):
        picker.pick(ask(text(f"p{number}", rng.choice([4000, 8000, 12_000]))), now=1.0)
    tokens = [undone(picker, n, now=1.0) for n in "abcd"]
    assert max(tokens) < 1.3 * min(tokens)


def test_chance_decides_between_equals() -> None:
    chosen = {a_picker(seed=seed).pick(ask(text("p")), now=1.0).decision.chosen for seed in range(40)}
    assert chosen == set("abcd")


# -- the answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_a_request_is_in_flight_until_its_end_however_often_that_is_told(outcome: Outcome) -> None:
    picker = a_picker(on=endpoints("ab"))
    pick = picker.pick(ask(text("p")), now=1.0)
    assert in_flight(picker) == {pick.decision.chosen: 1}
    for _ in range(3):
        picker.end(pick, outcome=outcome, now=2.0)
        picker.detach(pick, now=2.0)
        assert in_flight(picker) == {}
    assert pick.decision.outcome == outcome
    assert undone(picker, pick.decision.chosen, now=2.0) == 0


def test_a_request_that_got_no_answer_leaves_no_prefix_behind() -> None:
    picker = a_picker()
    pick = picker.pick(ask(text("p")), now=1.0)
    assert len(picker.table) == 31  # of 8,000 bytes
    picker.end(pick, outcome="failed", now=2.0)
    assert len(picker.table) == 0


def test_a_refused_request_leaves_no_prefix_behind() -> None:
    picker = a_picker()
    serve(picker, ask(text("p")), now=1.0, status=503)
    assert len(picker.table) == 0


def test_a_failure_takes_back_only_what_nobody_else_recorded() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("p")), now=1.0)
    serve(picker, ask(text("p") + text("more")), now=2.0, status=500)
    assert picker.pick(ask(text("p") + text("more")), now=3.0).decision.matched_tokens == 31 * 64


def test_headers_free_the_work_of_an_answer_that_is_not_streamed_but_not_of_a_streamed_one() -> None:
    for stream, left in ((False, 0), (True, 2000)):
        picker = a_picker()
        pick = picker.pick(ask(text("p"), stream=stream), now=1.0)
        picker.on_response_headers(pick, status=200, served=None, now=1.0)
        assert undone(picker, pick.decision.chosen, now=1.0) == left
        assert in_flight(picker) == {pick.decision.chosen: 1}


def test_booking_and_prefix_move_to_who_really_served() -> None:
    picker = a_picker()
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    first, second = pick.decision.chosen, pick.decision.candidates[1].name
    assert picker.on_response_headers(pick, status=200, served=pick.destinations[1], now=1.1)
    assert in_flight(picker) == {second: 1}
    assert undone(picker, first, now=1.1) == 0
    assert undone(picker, second, now=1.1) == 2000
    picker.end(pick, outcome="ended", now=2.0)
    assert in_flight(picker) == {}
    assert held_bytes(picker, first) == 0
    again = picker.pick(ask(text("p")), now=3.0)
    assert again.decision.chosen == second
    assert pick.decision.served == pick.destinations[1]
    check(picker)


def test_the_first_choice_serving_is_no_mismatch() -> None:
    picker = a_picker()
    pick = picker.pick(ask(text("p")), now=1.0)
    assert not picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=1.1)


def test_an_answer_from_an_unknown_server_is_booked_nowhere_else() -> None:
    picker = a_picker()
    pick = picker.pick(ask(text("p")), now=1.0)
    assert picker.on_response_headers(pick, status=200, served=ELSEWHERE, now=1.1)
    assert in_flight(picker) == {}
    assert len(picker.table) == 0
    picker.end(pick, outcome="ended", now=2.0)
    assert in_flight(picker) == {}
    check(picker)


def test_an_endpoint_that_got_another_address_meanwhile_is_no_mismatch() -> None:
    picker = a_picker(on=endpoints("a"))
    pick = picker.pick(ask(text("p")), now=1.0)
    picker.set_endpoints([Endpoint(EndpointName("a"), ELSEWHERE)], now=1.1)
    assert not picker.on_response_headers(pick, status=200, served=A, now=1.2)
    picker.end(pick, outcome="ended", now=2.0)
    assert in_flight(picker) == {}
    assert len(picker.table) == 0  # what was recorded was the old process's
    check(picker)


def test_a_stream_let_go_is_left_to_the_scrapes_and_may_still_end() -> None:
    picker = a_picker(on=endpoints("ab"))
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    picker.on_response_headers(pick, status=200, served=None, now=1.1)
    picker.detach(pick, now=1.1)
    picker.end(pick, outcome="ended", now=1.2)
    assert in_flight(picker) == {}
    assert pick.decision.outcome == "detached"
    assert undone(picker, pick.decision.chosen, now=1.1) > 0  # the answer's prefill still goes on


def test_ends_after_the_endpoint_left_and_came_back_do_no_harm() -> None:
    picker = a_picker(on=endpoints("a"))
    old = picker.pick(ask(text("p")), now=1.0)
    picker.on_response_headers(old, status=200, served=A, now=1.1)
    picker.set_endpoints([], now=1.2)
    picker.set_endpoints(endpoints("a"), now=1.3)
    picker.end(old, outcome="ended", now=2.0)
    assert in_flight(picker) == {}
    assert len(picker.table) == 0
    check(picker)


# -- learning ----------------------------------------------------------------------------------------------------


def test_a_sampled_answer_teaches_bytes_per_token() -> None:
    picker = a_picker()
    for number in range(30):
        pick = serve(picker, ask(text(f"p{number}")), now=float(number))
        picker.on_feedback(pick, ResponseFeedback(prompt_tokens=4000, cached_tokens=7), now=number + 0.5)
        assert pick.decision.cached_tokens == 7
    assert picker.pick(ask(text("q")), now=40.0).decision.prompt_tokens == pytest.approx(4000, rel=0.02)


def test_counters_teach_bytes_per_token_without_any_sampling() -> None:
    picker = a_picker(on=endpoints("a"))
    for second in range(1, 200):
        serve(picker, ask(text(f"p{second}", 3000)), now=float(second))
        metrics = EndpointMetrics(scraped_at=second + 0.9, finished=second, prompt_tokens=1500.0 * second)
        picker.observe(EndpointName("a"), metrics, now=second + 0.9)
    assert picker.pick(ask(text("q")), now=300.0).decision.prompt_tokens == pytest.approx(4000, rel=0.02)


def test_a_request_that_is_held_open_does_not_hold_its_prompt() -> None:
    picker = a_picker(PolicySpec(sampling=Sampling(share=0.0)), on=endpoints("a"))
    prompt = text("p", 400_000)
    before = sys.getrefcount(prompt)
    pick = picker.pick(ask(prompt), now=1.0)
    assert sys.getrefcount(prompt) == before
    picker.end(pick, outcome="ended", now=2.0)


def test_a_picture_teaches_what_pictures_take_and_nothing_of_text() -> None:
    picker = a_picker()
    inference = InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=text("p"), opaque=True)
    pick = picker.pick(PickRequest(request_id="r", inference=inference), now=1.0)
    for _ in range(30):
        picker.on_feedback(pick, ResponseFeedback(prompt_tokens=5000), now=1.5)
        picker.on_feedback(
            picker.pick(ask(text("t")), now=1.6), ResponseFeedback(prompt_tokens=2000), now=1.7
        )
    assert picker.pick(ask(text("q")), now=2.0).decision.prompt_tokens == pytest.approx(2000, rel=0.1)
    again = picker.pick(PickRequest(request_id="r", inference=inference), now=2.0)
    assert again.decision.prompt_tokens == pytest.approx(5000, rel=0.1)


def test_a_sampled_answers_text_is_there_for_the_next_turn() -> None:
    picker = a_picker(PolicySpec(sampling=Sampling(share=1.0)), on=endpoints("a"))
    prompt, answer = text("p", 8192), text("answer", 2048)
    pick = serve(picker, ask(prompt), now=1.0)
    feedback = ResponseFeedback(first_token_at=1.25, text=answer.decode(), complete=True)
    picker.on_feedback(pick, feedback, now=1.5)
    assert pick.decision.ttft_s == pytest.approx(0.25)
    next_turn = picker.pick(ask(prompt + answer + text("again", 2048)), now=2.0).decision
    assert next_turn.matched_tokens == 2560
    check(picker)


def test_the_text_of_an_answer_whose_server_left_is_not_indexed() -> None:
    picker = a_picker(on=endpoints("a"))
    pick = serve(picker, ask(text("p", 8192)), now=1.0)
    picker.set_endpoints(endpoints("b"), now=1.5)
    picker.on_feedback(pick, ResponseFeedback(text=text("answer").decode(), complete=True), now=2.0)
    assert len(picker.table) == 0


def test_answers_take_cache_too() -> None:
    picker = a_picker(on=endpoints("a"))
    for second, generated in enumerate([1000.0, 1500.0]):
        metrics = EndpointMetrics(scraped_at=float(second), generated_tokens=generated)
        picker.observe(EndpointName("a"), metrics, now=float(second))
    assert held_bytes(picker, "a") == 2000  # 500 tokens


def test_a_server_whose_counters_fell_has_a_cold_cache() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, prompt_tokens=9000.0), now=0.5)
    serve(picker, ask(text("p")), now=1.0)
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=2.0, prompt_tokens=0.0), now=2.0)
    assert picker.pick(ask(text("p")), now=3.0).decision.matched_tokens == 0
    check(picker)


def test_the_answer_of_a_process_that_has_since_restarted_teaches_the_table_nothing() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, prompt_tokens=9000.0), now=0.5)
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    picker.on_response_headers(pick, status=200, served=A, now=1.1)
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=2.0, prompt_tokens=0.0), now=2.0)
    picker.on_feedback(pick, ResponseFeedback(text="x" * 900, complete=True), now=2.5)
    picker.end(pick, outcome="ended", now=2.6)
    assert held_bytes(picker, "a") == 0
    check(picker)


def test_the_table_holds_what_the_server_says_it_holds() -> None:
    picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=5000)), on=endpoints("a"))
    assert picker.table.capacity_bytes(EndpointName("a")) == 20_000
    picker.observe(EndpointName("a"), EndpointMetrics(scraped_at=1.0, capacity_tokens=3000), now=1.0)
    for number in range(10):
        serve(picker, ask(text(f"p{number}")), now=2.0 + number)
        picker.housekeep(now=3.0 + number)
    assert picker.table.capacity_bytes(EndpointName("a")) == 12_000
    assert held_bytes(picker, "a") <= 12_000
    assert picker.pick(ask(text("p9")), now=20.0).decision.matched_tokens > 1900
    assert picker.pick(ask(text("p0")), now=20.0).decision.matched_tokens == 0


# -- policy ------------------------------------------------------------------------------------------------------


def test_a_new_policy_keeps_the_table_and_takes_effect_with_the_next_pick() -> None:
    picker = a_picker()
    serve(picker, ask(text("p")), now=1.0)
    spec = PolicySpec(rule="affinity", table=Table(default_capacity_tokens=1000))
    picker.set_policy(policy_of(spec), now=2.0)
    decision = picker.pick(ask(text("p")), now=3.0).decision
    assert decision.rule == "affinity"
    assert decision.matched_tokens > 1900
    assert picker.table.capacity_bytes(EndpointName("a")) == 4000
    assert picker.policy.spec == spec


def test_chunks_cut_differently_start_the_table_anew_and_older_requests_end_quietly() -> None:
    picker = a_picker(on=endpoints("ab"))
    old = [picker.pick(ask(text("p"), stream=True), now=1.0) for _ in range(4)]
    picker.set_policy(policy_of(PolicySpec(chunks=Chunks(size_bytes=128))), now=2.0)
    assert len(picker.table) == 0
    picker.on_response_headers(old[0], status=200, served=old[0].destinations[1], now=2.1)  # moved
    picker.on_response_headers(old[1], status=500, served=None, now=2.1)
    picker.on_response_headers(old[2], status=200, served=None, now=2.1)
    picker.on_feedback(old[2], ResponseFeedback(text="answer" * 100, complete=True), now=2.2)
    for pick in old:
        picker.end(pick, outcome="ended", now=3.0)
    assert in_flight(picker) == {}
    assert len(picker.table) == 0
    check(picker)
    serve(picker, ask(text("p")), now=4.0)
    assert picker.pick(ask(text("p")), now=5.0).decision.prompt_chunks == 62


def test_the_share_of_sampled_requests_is_the_policys() -> None:
    for share, fewest, most in ((0.0, 0, 0), (0.1, 60, 140), (1.0, 1000, 1000)):
        picker = a_picker(PolicySpec(sampling=Sampling(share=share)))
        sampled = sum(picker.pick(ask(), now=1.0).sampled for _ in range(1000))
        assert fewest <= sampled <= most


# -- decisions ---------------------------------------------------------------------------------------------------


def test_a_decision_says_what_was_known_and_why() -> None:
    picker = a_picker()
    picker.observe(
        EndpointName("b"), EndpointMetrics(scraped_at=0.5, running=3, waiting=2, kv_usage=0.5), now=0.5
    )
    pick = picker.pick(ask(text("p"), model="m"), now=1.0)
    decision = pick.decision
    assert (decision.request_id, decision.kind, decision.model, decision.adapter) == (
        "r",
        "completions",
        "m",
        "",
    )
    assert (decision.rule, decision.policy) == ("least-cost", "test")
    assert decision.at_unix_s == 1001.0
    assert (decision.prompt_tokens, decision.prompt_chunks, decision.matched_tokens) == (2000, 31, 0)
    assert decision.destinations == pick.destinations
    assert {c.name for c in decision.candidates} == set("abcd")
    loaded = decision.candidates[-1]
    assert (loaded.name, loaded.in_flight, loaded.waiting, loaded.kv_usage) == ("b", 5, 2, 0.5)
    assert loaded.score_s == pytest.approx(sum(loaded.parts_s.values()))
    assert loaded.parts_s["in_flight"] == pytest.approx(5 * 50 / 8000)
    assert decision.outcome == ""
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=1.2)
    picker.end(pick, outcome="ended", now=2.0)
    assert (decision.status, decision.served, decision.outcome) == (200, pick.destinations[0], "ended")


def test_a_decision_shows_at_most_ten_candidates_the_chosen_first() -> None:
    many = [Endpoint(EndpointName(f"e{i}"), Address("10.1.0.1", 8000 + i)) for i in range(30)]
    decision = a_picker(on=many).pick(ask(text("p")), now=1.0).decision
    assert len(decision.candidates) == 10
    assert decision.candidates[0].name == decision.chosen


def test_an_explanation_is_one_line_of_ascii_whatever_the_names() -> None:
    odd = Endpoint(EndpointName("pöd\r\nx-evil: 1"), A)
    explanation = a_picker(on=[odd]).pick(ask(text("p")), now=1.0).explanation
    assert explanation.isascii()
    assert explanation.isprintable()
    assert "rule=least-cost" in explanation
