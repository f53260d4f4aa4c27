"""The picker as its callers see it: a new policy, and the content of a decision."""

from __future__ import annotations

import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import PolicySpec
from epp.config.routing import Chunks, Sampling, Table
from epp.picker.scheduling.candidates import ShownCandidates
from epp.request.response import ResponseFeedback
from tests.unit.picker.picker_questions import (
    A,
    a_picker,
    ask,
    check,
    endpoints,
    in_flight,
    policy_of,
    serve,
    text,
)

# -- policy --------------------------------------------------------------------------------------------------


def test_a_new_policy_keeps_the_table_and_takes_effect_with_the_next_pick() -> None:
    picker = a_picker()
    serve(picker, ask(text("p")), now=1.0)
    spec = PolicySpec(rule="affinity", table=Table(default_capacity_tokens=1000))
    picker.set_policy(policy_of(spec), now=2.0)
    decision = picker.pick(ask(text("p")), now=3.0).decision
    assert decision.rule == "affinity"
    assert decision.matched_tokens > 1900
    assert picker.caches.table.mirrors[EndpointName("a")].capacity_bytes == 4000
    assert picker.policy.spec == spec


def test_new_chunk_size_empties_table_and_older_requests_end_without_error() -> None:
    picker = a_picker(on=endpoints("ab"))
    old = [picker.pick(ask(text("p"), stream=True), now=1.0) for _ in range(4)]
    picker.set_policy(policy_of(PolicySpec(chunks=Chunks(size_bytes=128))), now=2.0)
    assert picker.caches.table.entries == 0
    picker.on_response_headers(old[0], status=200, served=old[0].destinations[1], now=2.1)  # moved
    picker.on_response_headers(old[1], status=500, served=None, now=2.1)
    picker.on_response_headers(old[2], status=200, served=None, now=2.1)
    picker.on_feedback(old[2], ResponseFeedback(first_token_at=2.15), now=2.2)
    for pick in old:
        picker.end(pick, outcome="ended", now=3.0)
    assert in_flight(picker) == {}
    moved = old[0].state.endpoint.name
    assert {mirror.name for mirror in picker.caches.table.mirrors.values() if mirror.entries} <= {moved}
    check(picker)
    serve(picker, ask(text("p")), now=4.0)
    assert picker.pick(ask(text("p")), now=5.0).decision.prompt_chunks == 62


def test_the_share_of_sampled_requests_is_the_policys() -> None:
    for share, fewest, most in ((0.0, 0, 0), (0.1, 60, 140), (1.0, 1000, 1000)):
        picker = a_picker(PolicySpec(sampling=Sampling(share=share)))
        sampled = sum(picker.pick(ask(), now=1.0).sampled for _ in range(1000))
        assert fewest <= sampled <= most


# -- decisions -----------------------------------------------------------------------------------------------


def test_a_decision_shows_the_known_numbers_and_the_reason() -> None:
    picker = a_picker()
    picker.news.observe(
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
    assert loaded.parts_s["stall"] > 0.0
    assert decision.outcome == ""
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=1.2)
    picker.end(pick, outcome="ended", now=2.0)
    assert (decision.status, decision.served, decision.outcome) == (200, pick.destinations[0], "ended")


def test_a_decision_shows_at_most_ten_candidates_the_chosen_first() -> None:
    many = [Endpoint(EndpointName(f"e{i}"), Address("10.1.0.1", 8000 + i)) for i in range(30)]
    decision = a_picker(on=many).pick(ask(text("p")), now=1.0).decision
    assert isinstance(decision.candidates, ShownCandidates)
    assert len(decision.candidates) == 10
    assert decision.candidates[0].name == decision.chosen


def test_an_explanation_is_one_line_of_ascii_whatever_the_names() -> None:
    odd = Endpoint(EndpointName("pöd\r\nx-evil: 1"), A)
    explanation = a_picker(on=[odd]).pick(ask(text("p")), now=1.0).explanation
    assert explanation.isascii()
    assert explanation.isprintable()
    assert "rule=least-cost" in explanation
