"""The record of candidates: made when somebody looks, and then what the rule saw."""

from __future__ import annotations

from epp.policy import PolicySpec
from epp.scheduling.candidates import View
from epp.types import Address, EndpointName
from epp.views import Shown

SPEC = PolicySpec()


def a_view(name: str, *, backlog_tokens: float = 0.0, excluded: str = "") -> View:
    return View(
        name=EndpointName(name),
        address=Address("10.0.0.1", 8000),
        cached_tokens=128,
        matched_tokens=0,
        uncached_tokens=1000,
        backlog_tokens=backlog_tokens,
        in_flight=2,
        waiting=1,
        kv_usage=0.5,
        rate=10_000.0,
        has_adapter=False,
        free_slot=False,
        score_s=0.25,
        excluded=excluded,
    )


def test_a_candidate_says_what_the_rule_saw_of_its_endpoint() -> None:
    candidate = Shown([a_view("a", backlog_tokens=5000.7, excluded="waiting")], spec=SPEC, adapter="sql")[0]
    assert (candidate.name, candidate.address) == ("a", Address("10.0.0.1", 8000))
    assert (candidate.matched_tokens, candidate.uncached_tokens, candidate.backlog_tokens) == (
        128,
        1000,
        5000,
    )
    assert (candidate.in_flight, candidate.waiting, candidate.kv_usage) == (2, 1, 0.5)
    assert (candidate.prefill_tokens_per_s, candidate.score_s) == (10_000.0, 0.25)
    assert candidate.parts_s["backlog"] == 0.50007
    assert candidate.parts_s["lora"] == 2 * SPEC.lora.load_seconds  # no slot is free
    assert candidate.excluded == "waiting"


def test_candidates_can_be_counted_sliced_and_gone_through_and_stay_the_same_ones() -> None:
    views = [a_view(name) for name in "abcdefghijkl"]
    candidates = Shown(views, spec=SPEC, adapter="")
    assert len(candidates) == 10
    assert [c.name for c in candidates] == list("abcdefghij")
    assert [c.name for c in candidates[:4]] == list("abcd")
    assert candidates[-1].name == "j"
    assert candidates[0] is next(iter(candidates))


def test_candidates_do_not_follow_a_list_that_changes_after_the_pick() -> None:
    views = [a_view("a"), a_view("b")]
    candidates = Shown(views, spec=SPEC, adapter="")
    views.reverse()
    assert [c.name for c in candidates] == ["a", "b"]
