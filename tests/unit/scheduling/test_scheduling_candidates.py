"""The gate: who is left out before a rule decides, and that somebody always remains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.policy import Load, PolicySpec
from epp.scheduling.candidates import View, gate, over_threshold
from epp.types import Address, EndpointName

SPEC = PolicySpec(load=Load(max_waiting=10, max_kv_usage=0.9, max_undone_tokens=1000))


def view(
    name: str,
    *,
    waiting: int = 0,
    kv_usage: float = 0.0,
    backlog: float = 0.0,
) -> View:
    return View(
        name=EndpointName(name),
        address=Address("10.0.0.1", 1 + ord(name[0])),
        cached_tokens=0,
        matched_tokens=0,
        uncached_tokens=100,
        backlog_tokens=backlog,
        in_flight=0,
        waiting=waiting,
        kv_usage=kv_usage,
        rate=1000.0,
        has_adapter=False,
        free_slot=False,
    )


def kept(views: list[View]) -> str:
    return "".join(v.name for v in gate(views, spec=SPEC).views)


@pytest.mark.parametrize(
    ("over", "at_limit", "why"),
    [
        (view("a", waiting=11), view("a", waiting=10), "waiting"),
        (view("a", kv_usage=0.91), view("a", kv_usage=0.9), "kv_usage"),
        (view("a", backlog=1001.0), view("a", backlog=1000.0), "undone"),
    ],
)
def test_a_threshold_is_crossed_above_it_not_at_it(over: View, at_limit: View, why: str) -> None:
    assert over_threshold(over, SPEC) == why
    assert over_threshold(at_limit, SPEC) == ""


def test_no_undone_limit_is_no_limit() -> None:
    assert over_threshold(view("a", backlog=1e12), PolicySpec()) == ""


def test_a_full_cache_leaves_nobody_out_unless_a_policy_says_so() -> None:
    assert over_threshold(view("a", kv_usage=1.0), PolicySpec()) == ""


def test_endpoints_over_a_threshold_are_left_out_with_the_reason() -> None:
    heavy = view("a", waiting=11)
    assert kept([heavy, view("b"), view("c")]) == "bc"
    assert heavy.excluded == "waiting"


def test_all_over_is_saturated_and_all_stay() -> None:
    views = [view("a", waiting=11), view("b", kv_usage=1.0)]
    gated = gate(views, spec=SPEC)
    assert gated.saturated
    assert list(gated.views) == views
    assert [v.excluded for v in views] == ["", ""]


VIEWS = st.lists(
    st.builds(
        view,
        st.sampled_from("abcdefgh"),
        waiting=st.integers(0, 20),
        kv_usage=st.floats(0, 1),
        backlog=st.floats(0, 2000),
    ),
    min_size=1,
    max_size=8,
)


@given(VIEWS)
def test_the_gate_leaves_somebody_and_marks_exactly_the_others(views: list[View]) -> None:
    gated = gate(views, spec=SPEC)
    assert gated.views
    assert [v for v in views if not v.excluded] == list(gated.views)
    if not gated.saturated:
        assert all(not over_threshold(v, SPEC) for v in gated.views)
