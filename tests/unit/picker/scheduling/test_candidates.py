"""The record of candidates is made when somebody looks, and shows what the rule saw."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from epp.base.types import Address, EndpointName
from epp.config.policy import PolicySpec
from epp.config.routing import LoadSettings, Lora
from epp.picker.scheduling.candidates import ShownCandidates
from epp.picker.scheduling.least_cost import LeastCost
from epp.picker.scheduling.schedule import Scheduler
from epp.picker.scheduling.snapshot import SentPick, Snapshot
from tests.unit.picker.scheduling.snapshots import UNKNOWN, SeenEndpoint, request, snapshot

SPEC = PolicySpec(load=LoadSettings(max_waiting=5), lora=Lora(load_seconds=0.5))


def shown(
    seen: list[SeenEndpoint],
    *,
    adapter: str = "",
    look: Snapshot | None = None,
    sent: Sequence[SentPick] = (),
) -> ShownCandidates:
    """Return the candidates for a request at 10.0 for the prefix 1, after other requests were sent."""
    asked, look = request(seen, prefix=1, at=10.0), look or snapshot(seen, adapter=adapter)
    rule = LeastCost(SPEC, random.Random(0))
    for each in sent:
        rule.committed(each)
    choice = Scheduler(SPEC, rule).schedule(asked, look)
    best = int(asked.cached_tokens.max())
    return ShownCandidates(choice.only_ranked(), SPEC, best)


def test_a_candidate_shows_the_numbers_that_the_rule_used() -> None:
    heavy = SeenEndpoint(
        "a",
        cached=128,
        backlog=5000.7,
        in_flight=2,
        waiting=9,
        kv_usage=0.5,
        rate=10_000.0,
        has_adapter=False,
    )
    candidate = shown([heavy, SeenEndpoint("b")], adapter="sql")[1]
    assert (candidate.name, candidate.address) == ("a", Address("10.0.0.1", 8000))
    assert (candidate.matched_tokens, candidate.uncached_tokens, candidate.backlog_tokens) == (128, 872, 5000)
    assert (candidate.in_flight, candidate.waiting, candidate.kv_usage) == (2, 9, 0.5)
    # this endpoint is left out, so it has no score
    assert (candidate.prefill_tokens_per_s, candidate.score_s) == (10_000.0, 0.0)
    assert candidate.parts_s["backlog"] == pytest.approx(0.50007)
    assert candidate.parts_s["lora"] == 2 * SPEC.lora.load_seconds  # no slot for an adapter is free
    assert candidate.excluded == "waiting"


def test_unknown_load_is_shown_as_unknown() -> None:
    candidate = shown([SeenEndpoint("a", waiting=UNKNOWN, kv_usage=UNKNOWN)])[0]
    assert (candidate.waiting, candidate.kv_usage) == (None, None)


def test_the_parts_sum_to_the_score_if_a_copy_has_half_the_price() -> None:
    holder = SeenEndpoint("a", cached=800, backlog=9000.0, in_flight=40)
    sent = [SentPick(EndpointName("a"), 5.0, prefix=1)] * 4
    first, second = shown([holder, SeenEndpoint("c", in_flight=10)], sent=sent)
    assert first.name == "c"
    assert second.score_s == pytest.approx(sum(second.parts_s.values()))
    assert first.score_s == pytest.approx(sum(first.parts_s.values()))
    assert first.parts_s["stall"] == pytest.approx(0.15 * 10 - (1 + 0.15 * 10) * 0.8 / 2)
    assert first.parts_s["prefill"] == pytest.approx(1.0), "the discount is taken from the stall first"
