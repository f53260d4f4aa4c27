"""A new policy, the content of a decision, and a policy in dry run."""

import random

import pytest
from msgspec.structs import replace

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import (
    Chunks,
    LoadSettings,
    PolicySpec,
    Sampling,
    Table,
)
from epp.observe.telemetry.decisions import DecisionRing, as_json, encode
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.decision import Question
from epp.picker.picker import Picker
from epp.picker.scheduling.candidates import ShownCandidates
from epp.request.response import ResponseFeedback
from tests.invariants.picker import check_dry_run, check_picker
from tests.unit.picker.picker_questions import (
    A,
    a_picker,
    ask,
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
    picker.set_policy(policy_of(spec))
    decision = picker.pick(ask(text("p")), now=3.0).decision
    assert decision.rule == "affinity"
    assert decision.matched_tokens > 1900
    assert picker.caches.table.mirrors[EndpointName("a")].capacity_bytes == 4000
    assert picker.policy.spec == spec


def test_new_chunk_size_empties_table_and_older_requests_end_without_error() -> None:
    picker = a_picker(on=endpoints("ab"))
    old = [picker.pick(ask(text("p"), stream=True), now=1.0) for _ in range(4)]
    picker.set_policy(policy_of(PolicySpec(chunks=Chunks(size_bytes=128))))
    assert picker.caches.table.entries == 0
    picker.on_response_headers(old[0], status=200, served=old[0].destinations[1], now=2.1)  # moved
    picker.on_response_headers(old[1], status=500, served=None, now=2.1)
    picker.on_response_headers(old[2], status=200, served=None, now=2.1)
    picker.on_feedback(old[2], ResponseFeedback(first_token_at=2.15), now=2.2)
    for pick in old:
        picker.end(pick, outcome="ended", now=3.0)
    assert in_flight(picker) == {}
    assert picker.caches.table.entries == 0
    check_picker(picker)
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
    loaded = list(decision.candidates)[-1]
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
    shown = list(decision.candidates)
    assert len(shown) == 10
    assert shown[0].name == decision.chosen


def test_an_explanation_is_one_line_of_ascii_whatever_the_names() -> None:
    odd = Endpoint(EndpointName("pöd\r\nx-evil: 1"), A)
    explanation = a_picker(on=[odd]).pick(ask(text("p")), now=1.0).explanation
    assert explanation.isascii()
    assert explanation.isprintable()
    assert "rule=least-cost" in explanation


NAMES = ("a", "b", "c")


def picker_trying(spec: PolicySpec, tried: PolicySpec | None = None, *, seed: int = 0) -> Picker:
    picker = Picker(policy_of(spec, "acts"), rng=random.Random(seed))
    picker.news.set_endpoints(
        [Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate(NAMES)], now=0.0
    )
    picker.set_dry_run(policy_of(tried, "tried") if tried is not None else None)
    return picker


def numbered_request(n: int) -> Question:
    prompt = random.Random(n % 5).randbytes(4000).hex().encode()
    return replace(ask(prompt), request_id=f"r{n}")


def chosen(picker: Picker, *, picks: int = 60) -> list[str]:
    made = [picker.pick(numbered_request(n), now=n * 0.01) for n in range(picks)]
    if picker.dry_run is not None:
        check_dry_run(picker.dry_run)
    return [pick.decision.chosen for pick in made]


def test_the_policy_in_force_picks_as_it_would_without_a_dry_run() -> None:
    spec = PolicySpec()
    alone = chosen(picker_trying(spec))
    for tried in (PolicySpec(rule="random"), PolicySpec(rule="round-robin"), PolicySpec(rule="affinity")):
        assert chosen(picker_trying(spec, tried)) == alone


def test_an_equal_policy_agrees_on_every_pick() -> None:
    for rule in ("least-cost", "random", "affinity"):
        picker = picker_trying(PolicySpec(rule=rule), PolicySpec(rule=rule))
        chosen(picker)
        assert picker.dry_run is not None
        assert (picker.dry_run.picks, picker.dry_run.agreed) == (60, 60), rule


def test_the_decision_shows_what_another_policy_would_have_picked() -> None:
    picker = picker_trying(PolicySpec(rule="affinity"), PolicySpec(rule="round-robin"))
    picks = [picker.pick(numbered_request(0), now=0.0) for _ in range(3)]
    assert len({pick.decision.chosen for pick in picks}) == 1, (
        "the request goes to the server that holds the prompt"
    )
    would = [pick.decision.dry_run for pick in picks]
    assert [w.chosen for w in would if w is not None] == ["a", "b", "c"]
    assert [w.agrees for w in would if w is not None].count(True) == 1
    assert {(w.policy, w.rule, w.reason) for w in would if w is not None} == {
        ("tried", "round-robin", "turn")
    }


def test_rules_without_memory_can_be_tried_beside_another() -> None:
    for tried, reason in ((PolicySpec(rule="prefix-hash"), "hash"), (PolicySpec(rule="session"), "session")):
        picker = picker_trying(PolicySpec(), tried)
        would = []
        for n in range(20):
            pick = picker.pick(replace(numbered_request(n), session=f"session-{n % 5}"), now=0.0)
            would.append(pick.decision.dry_run)
            picker.end(pick, outcome="ended", now=0.0)
        assert {(w.rule, w.reason) for w in would if w is not None} == {(tried.rule, reason)}
        owners = [w.chosen for w in would if w is not None]
        assert owners == owners[:5] * 4, "each prompt and each session keeps its owner"


def test_a_policy_that_would_refuse_picks_no_server() -> None:
    picker = picker_trying(
        PolicySpec(), PolicySpec(load=LoadSettings(max_waiting=0, when_saturated="Reject"))
    )
    for name in NAMES:
        picker.news.observe(EndpointName(name), EndpointMetrics(scraped_at=0.0, waiting=5), now=0.0)
    would = picker.pick(numbered_request(0), now=0.1).decision.dry_run
    assert would is not None
    assert (would.chosen, would.reason, would.agrees) == ("", "saturated", False)
    assert (would.more_cached_tokens, would.more_s) == (0, 0.0)
    assert picker.dry_run is not None
    assert picker.dry_run.refused == 1


def test_the_change_of_a_dry_run_is_predicted() -> None:
    picker = picker_trying(PolicySpec(rule="round-robin"), PolicySpec(rule="affinity"))
    first, second = (picker.pick(numbered_request(0), now=0.0) for _ in range(2))
    tried, would = picker.dry_run, second.decision.dry_run
    assert first.decision.chosen != second.decision.chosen
    assert tried is not None
    assert would is not None
    assert would.chosen == first.decision.chosen, "the request goes back to the server that holds the prompt"
    prompt = second.decision.prompt_tokens
    assert 0.9 * prompt < would.more_cached_tokens <= prompt
    rate = 8000.0  # from the policy, since nothing is learned yet
    # The server that holds the prompt still has to compute the first request, and the other server would
    # have to compute this one.
    assert would.more_s == pytest.approx((2 * prompt - would.more_cached_tokens - prompt) / rate, abs=1e-3)
    assert (tried.prompt_tokens, tried.cached_tokens) == (2 * prompt, 0)
    assert (tried.more_cached_tokens, tried.refused) == (would.more_cached_tokens, 0)
    check_dry_run(tried)


def test_without_a_dry_run_the_decision_says_nothing() -> None:
    picker = picker_trying(PolicySpec(), PolicySpec(rule="random"))
    picker.set_dry_run(None)
    assert picker.pick(numbered_request(0), now=0.0).decision.dry_run is None


def test_the_decision_and_a_counter_show_the_dry_run() -> None:
    ring = DecisionRing(maxlen=10)
    metrics = Metrics(decisions=ring, state=PickerStatus)
    picker = picker_trying(PolicySpec(rule="round-robin"), PolicySpec(rule="round-robin"))
    picker.subscribe(metrics.on_event)
    for n in range(3):
        picker.pick(numbered_request(n), now=0.0)
    assert b'epp_dry_run_picks_total{agrees="true",policy="tried"} 3.0' in b"".join(metrics.pieces())
    record = ring.get("r0")
    assert record is not None
    assert b'"dry_run"' in encode(as_json(record))
    assert b'"policy": "tried"' in encode(as_json(record))
