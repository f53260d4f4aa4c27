"""What is booked for a request until its end, and what the picker learns from it."""

import sys
from math import inf

import pytest

from epp.base.types import (
    ApiKind,
    EndpointMetrics,
    EndpointName,
    InferenceRequest,
    Media,
    ModelCard,
    ModelList,
)
from epp.config.policy import PolicySpec, Sampling, Table
from epp.picker.decision import Question
from epp.request.response import ResponseFeedback
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import (
    A,
    a_picker,
    ask,
    endpoints,
    held_bytes,
    in_flight,
    serve,
    state,
    text,
    undone,
)

# -- the answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 400])
def test_an_answer_that_tells_of_an_error_leaves_no_prefix_behind(status: int) -> None:
    picker = a_picker()
    for name in "abcd":  # the counters of these servers, not headers, show that a prompt is computed
        picker.news.observe(EndpointName(name), EndpointMetrics(scraped_at=0.5, ttft_count=0.0), now=0.5)
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    picker.on_response_headers(pick, status=200, served=None, now=1.1)
    picker.on_feedback(pick, ResponseFeedback(status=status), now=1.2)
    picker.end(pick, outcome="ended", now=1.3)
    assert picker.caches.table.entries == 0
    assert (pick.computed, pick.failed, pick.decision.status) == (False, status == 500, status)


def test_a_failure_removes_only_chunks_that_no_other_request_recorded() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("p")), now=1.0)
    serve(picker, ask(text("p") + text("more")), now=2.0, status=500)
    assert picker.pick(ask(text("p") + text("more")), now=3.0).decision.matched_tokens == 31 * 64


def test_headers_end_the_work_of_a_plain_answer_but_not_of_streamed_answer() -> None:
    for stream, left in ((False, 0), (True, 2000)):
        picker = a_picker()
        pick = picker.pick(ask(text("p"), stream=stream), now=1.0)
        picker.on_response_headers(pick, status=200, served=None, now=1.0)
        assert undone(picker, pick.decision.chosen, now=1.0) == left
        assert in_flight(picker) == {pick.decision.chosen: 1}
        page = picker.pick(ask(model="", subset=frozenset({pick.destinations[0]})), now=1.0)
        picker.on_response_headers(page, status=200, served=None, now=1.0)
        unbegun = state(picker, page.decision.chosen).backlog.unbegun
        assert unbegun == (not stream), "an answer to a request without a body has no first token"


def test_booking_and_prefix_move_to_the_server_that_really_served() -> None:
    picker = a_picker()
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    first, second = pick.decision.chosen, list(pick.decision.candidates)[1].name
    picker.on_response_headers(pick, status=200, served=pick.destinations[1], now=1.1)
    assert in_flight(picker) == {second: 1}
    assert undone(picker, first, now=1.1) == 0
    assert (state(picker, first).account.begun_at, state(picker, second).account.begun_at) == (-inf, 1.1)
    assert undone(picker, second, now=1.1) == 2000
    picker.end(pick, outcome="ended", now=2.0)
    assert in_flight(picker) == {}
    assert held_bytes(picker, first) == 0
    again = picker.pick(ask(text("p")), now=3.0)
    assert again.decision.chosen == second
    assert pick.decision.served == pick.destinations[1]
    check_picker(picker)


@pytest.mark.parametrize("let_go", [True, False])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_whole_answer_that_nobody_reads_proves_its_prompt(share: float, let_go: bool) -> None:  # noqa: FBT001
    picker = a_picker(PolicySpec(sampling=Sampling(share=share)), on=endpoints("a"))
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, running=0), now=0.5)
    pick = picker.pick(ask(text("p")), now=1.0)
    picker.on_response_headers(pick, status=200, served=None, now=1.5)
    if let_go:
        picker.detach(pick, now=1.5)
    picker.end(pick, outcome="aborted", now=1.6)  # its client left
    assert (pick.guess.proven, pick.decision.outcome) == (True, "ended" if let_go else "aborted")
    assert state(picker, "a").loads == (0, 0), "the server has nothing more to do"
    again = picker.pick(ask(text("p")), now=1.6)
    assert again.decision.matched_tokens
    check_picker(picker)


# -- learning ------------------------------------------------------------------------------------------------


def test_a_sampled_answer_teaches_bytes_per_token() -> None:
    picker = a_picker()
    for number in range(30):
        pick = serve(picker, ask(text(f"p{number}")), now=float(number))
        picker.on_feedback(pick, ResponseFeedback(prompt_tokens=4000, cached_tokens=7), now=number + 0.5)
        assert pick.decision.cached_tokens == 7
    assert picker.pick(ask(text("q")), now=40.0).decision.prompt_tokens == pytest.approx(4000, rel=0.02)


def test_a_request_that_is_held_open_does_not_hold_its_prompt() -> None:
    picker = a_picker(PolicySpec(sampling=Sampling(share=0.0)), on=endpoints("a"))
    prompt = text("p", 400_000)
    before = sys.getrefcount(prompt)
    pick = picker.pick(ask(prompt), now=1.0)
    assert sys.getrefcount(prompt) == before
    picker.end(pick, outcome="ended", now=2.0)


def test_a_picture_teaches_the_tokens_of_pictures_and_not_of_text() -> None:
    picker = a_picker()
    inference = InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=text("p"), media=Media(pictures=500))
    pick = picker.pick(Question(request_id="r", inference=inference), now=1.0)
    for _ in range(30):
        picker.on_feedback(pick, ResponseFeedback(prompt_tokens=5000), now=1.5)
        picker.on_feedback(
            picker.pick(ask(text("t")), now=1.6), ResponseFeedback(prompt_tokens=2000), now=1.7
        )
    assert picker.pick(ask(text("q")), now=2.0).decision.prompt_tokens == pytest.approx(2000, rel=0.1)
    again = picker.pick(Question(request_id="r", inference=inference), now=2.0)
    assert again.decision.prompt_tokens == pytest.approx(5000, rel=0.1)


def test_the_answer_of_a_restarted_process_changes_no_table() -> None:
    picker = a_picker(on=endpoints("a"))
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=0.5, prompt_tokens=9000.0), now=0.5)
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    picker.on_response_headers(pick, status=200, served=A, now=1.1)
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=2.0, prompt_tokens=0.0), now=2.0)
    picker.on_feedback(pick, ResponseFeedback(first_token_at=2.4), now=2.5)
    picker.end(pick, outcome="ended", now=2.6)
    assert held_bytes(picker, "a") == 0
    check_picker(picker)


def test_the_table_has_the_capacity_that_the_server_states() -> None:
    picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=5000)), on=endpoints("a"))
    assert picker.caches.table.mirrors[EndpointName("a")].capacity_bytes == 20_000
    picker.news.observe(EndpointName("a"), EndpointMetrics(scraped_at=1.0, capacity_tokens=3000), now=1.0)
    for number in range(10):
        serve(picker, ask(text(f"p{number}")), now=2.0 + number)
        picker.housekeep(now=3.0 + number)
    assert picker.caches.table.mirrors[EndpointName("a")].capacity_bytes == 12_000
    assert held_bytes(picker, "a") <= 12_000
    assert picker.pick(ask(text("p9")), now=20.0).decision.matched_tokens > 1900
    assert picker.pick(ask(text("p0")), now=20.0).decision.matched_tokens == 0


def test_a_prompt_that_is_certainly_too_long_is_sent_and_books_nothing() -> None:
    for limit, tokens in ((1000, 0), (None, 2000)):
        picker = a_picker(on=endpoints("a"))
        card = ModelCard("m", max_model_len=limit)
        picker.news.take_lists({EndpointName("a"): ModelList((card,))}, now=0.0)
        pick = picker.pick(ask(text("p")), now=1.0)
        assert undone(picker, "a", now=1.0) == tokens
        assert bool(picker.caches.table.match(pick.chain)) == bool(tokens)


def test_a_stream_that_ends_too_soon_proves_nothing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((1.1, 3900.0, ""), (1.1, 4000.0, "p"), (1.1, 8000.0, "pq"), (1.25, 0.0, "pq"))
    for end, computed, entered in cases:  # of two prompts of 8,000 tokens, where V is 8,000
        picker, ended = a_picker(on=endpoints("a")), list[bool]()
        (rule,) = picker.guesses.rules
        monkeypatch.setattr(rule, "ended", lambda _, *, computed, ended=ended: ended.append(computed))
        for now, counted in ((0.5, 0.0), (2.0, computed)):
            page = EndpointMetrics(scraped_at=now, ttft_count=0.0, prompt_tokens=counted, finished=counted)
            picker.news.observe(EndpointName("a"), page, now=now)
            for name in "pq" if now == 0.5 else "":
                pick = picker.pick(ask(text(name, 32_000), stream=True), now=1.0)
                picker.on_response_headers(pick, status=200, served=None, now=1.01)
                picker.end(pick, outcome="ended", now=end)  # or its client left
                assert pick.computed == (end > 1.2), "the server may be faster than V"
        assert ended == [False, False] * (end < 1.2) + [True] * len(entered)
        again = [picker.pick(ask(text(name, 32_000)), now=3.0) for name in "pq"]
        assert [pick.decision.matched_tokens > 7000 for pick in again] == [each in entered for each in "pq"]


def test_an_answer_without_content_proves_nothing_where_no_page_comes() -> None:
    picker = a_picker(PolicySpec(sampling=Sampling(share=1.0)), on=endpoints("a"))
    pick = serve(picker, ask(text("p")), now=1.0, status=204)
    assert (pick.guess.open, pick.guess.proven) == (False, False)


@pytest.mark.parametrize("let_go", [False, True])
@pytest.mark.parametrize(("began", "probes"), [(1.04, 0.0), (1.08, 0.0), (1.08, 50.0), (None, 0.0)])
def test_no_page_proves_a_prompt_on_its_way(began: float | None, probes: float, let_go: bool) -> None:  # noqa: FBT001
    picker = a_picker(on=endpoints("a"))
    pick = picker.pick(ask(text("p", 32_000), stream=began is not None), now=1.0)
    for now in (1.02, 1.04, 1.06, 1.08):
        page = EndpointMetrics(scraped_at=now, running=0, waiting=0, ttft_count=probes * now, finished=0.0)
        picker.news.observe(EndpointName("a"), page, now=now)
        if now == began:
            picker.on_response_headers(pick, status=200, served=None, now=now)
    if let_go:
        picker.detach(pick, now=1.1)
    picker.end(pick, outcome="ended", now=1.1)  # its client left
    # A page without any change, or one from before the headers, does not show this request.
    awaited = let_go and (began == 1.08 or not probes)
    assert (pick.guess.proven, picker.caches.table.guessed_entries) == (False, 79 * awaited)
    assert bool(undone(picker, "a", now=1.1)) == awaited
    for now in (3.0, 5.0) if awaited else ():
        page = EndpointMetrics(scraped_at=now, running=0, waiting=0, ttft_count=probes * 1.08 + 1)
        picker.news.observe(EndpointName("a"), page, now=now)
        assert pick.guess.proven


def test_headers_of_a_stream_prove_nothing_where_pages_show_the_prefill() -> None:
    picker = a_picker(on=endpoints("a"))
    for now, computed in ((0.0, 0.0), (1.0, 0.0), (3.0, 1.0)):
        page = EndpointMetrics(scraped_at=now, running=1, ttft_count=computed)
        picker.news.observe(EndpointName("a"), page, now=now)
        if now == 1.0:
            pick = picker.pick(ask(text("p"), stream=True), now=2.0)
            picker.on_response_headers(pick, status=200, served=None, now=2.1)
            assert picker.caches.table.entries == 0
    assert picker.caches.table.entries == len(pick.chain)
    picker.end(pick, outcome="aborted", now=4.0)
    assert picker.caches.table.entries == len(pick.chain)


@pytest.mark.parametrize("let_go", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_is_no_work_and_no_first_token(stream: bool, let_go: bool) -> None:  # noqa: FBT001
    picker = a_picker(on=endpoints("a"))
    refused, later = (picker.pick(ask(text(name), stream=stream), now=1.0) for name in "pq")
    picker.on_response_headers(refused, status=400, served=None, now=1.0)
    if let_go:
        picker.detach(refused, now=1.0)
    picker.end(refused, outcome="ended", now=1.0)
    assert later.guess.booking.ahead_tokens == undone(picker, "a", now=1.0) == 2000
    assert state(picker, "a").backlog.unbegun == 0, "the next page counts none for it"


@pytest.mark.parametrize("fate", ["restarted", "silent", "gone", "gone before"])
def test_the_guess_of_a_stream_that_was_let_go_ends_with_its_server(fate: str) -> None:
    picker = a_picker(on=endpoints("a"))
    page = EndpointMetrics(scraped_at=0.0, running=1, prompt_tokens=10.0)
    picker.news.observe(EndpointName("a"), page, now=0.0)
    pick = picker.pick(ask(text("p"), stream=True), now=1.0)
    if fate == "gone before":
        picker.news.set_endpoints([], now=1.0)
    picker.detach(pick, now=1.0)
    assert bool(picker.caches.table.match(pick.chain)) == (fate != "gone before")
    if fate == "gone":
        picker.news.set_endpoints([], now=2.0)
    elif fate != "gone before":
        after = EndpointMetrics(scraped_at=700.0, prompt_tokens=0.0) if fate == "restarted" else None
        picker.news.observe(EndpointName("a"), after, now=700.0)
    check_picker(picker)
    assert not picker.caches.table.match(pick.chain)
    assert not pick.guess.open
