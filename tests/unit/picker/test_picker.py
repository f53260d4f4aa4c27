"""The picker as its callers see it: its choice by prefixes, by the endpoints that may be picked, and by
load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from epp.base.errors import NoEndpointError, SaturatedError
from epp.base.types import ApiKind, EndpointMetrics, EndpointName, ModelCard, ModelList
from epp.config.policy import PolicySpec, RuleName
from epp.config.routing import LoadSettings
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from epp.sources.scraping.metrics_page import parse_page
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
    text,
    undone,
)
from tests.unit.sources.scraping.engine_pages import PAGES, idle

# -- prefixes ------------------------------------------------------------------------------------------------


def test_predicted_cached_tokens_are_whole_blocks_and_never_whole_prompt() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, block_size=16), now=0.5)
    serve(
        picker, ask(text("p", 8192)), now=1.0
    )  # 2,048 tokens are 128 blocks. Only whole chunks and whole blocks count.
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


def test_a_models_only_server_that_is_down_is_a_503_not_another_model() -> None:
    picker = a_picker(on=[*endpoints("a", model="m"), *endpoints("b", model="n")])
    for second in range(3):
        picker.news.observe(EndpointName("a"), None, now=float(second))
    with pytest.raises(NoEndpointError):
        picker.pick(ask(model="m"), now=4.0)
    assert picker.pick(ask(model="n"), now=4.0).destinations == (B,)


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


def test_a_server_without_numbers_gets_its_share_beside_vllm() -> None:
    picker, counts = a_picker(), dict.fromkeys("abcd", 0)
    open_picks: list[Pick] = []
    for number in range(400):
        now = 1.0 + number / 20
        if number % 20 == 0:
            for name in "abcd":
                page = EndpointMetrics(scraped_at=now)
                if name != "d":
                    page = replace(page, running=in_flight(picker).get(name, 0), waiting=0)
                picker.news.observe(EndpointName(name), page, now=now)
        if len(open_picks) == 8:
            done = open_picks.pop(0)
            picker.on_response_headers(done, status=200, served=done.destinations[0], now=now)
            picker.end(done, outcome="ended", now=now)
        open_picks.append(picker.pick(ask(text(f"p{number}"), stream=True), now=now))
        counts[open_picks[-1].decision.chosen] += 1
    assert 80 < counts["d"] < 120


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
        picker.check_integrity()
        assert not picker.news.left_out(now=now)
    assert min(pick.decision.matched_tokens for pick in begun) > 1900
    assert sum(undone(picker, name, now=now) for name in "ab") < 100


@pytest.mark.parametrize("engine", [*PAGES, "TensorRT-LLM, or no page"])
def test_an_engine_beside_vllm_gets_its_fair_share(engine: str) -> None:
    vllm = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    picker = a_picker(on=endpoints("abc"))
    chosen = []
    for n in range(60):
        other = idle(PAGES[engine][0]) if engine in PAGES else b""
        for name, page in zip("abc", (vllm, vllm, other), strict=True):
            read = parse_page(page, scraped_at=float(n)) if page else EndpointMetrics(scraped_at=float(n))
            picker.news.observe(EndpointName(name), read, now=float(n))
        chosen.append(serve(picker, ask(text(f"p{n}")), now=n + 0.1).decision.chosen)
    assert 14 <= chosen.count(EndpointName("c")) <= 26
