"""One server computes a prompt for another that answers (P/D)."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from epp.base.types import PREFILLER, Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, Role
from epp.config.policy import PolicySpec
from epp.picker.decision import Outcome, Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import (
    ADDRESSES,
    A,
    B,
    C,
    a_picker,
    ask,
    held_bytes,
    in_flight,
    text,
    undone,
)

LONG = 80_000
"""The size in bytes of 20,000 tokens. At the policy's rate their prefill takes 2.5 s, and to move their KV
cache takes 0.27 s.
"""
SHORT = 800
ROLES = {"a": Role.DECODE, "b": Role.UNSAID, "c": Role.PREFILL, "d": Role.PREFILL}


def fleet(roles: Mapping[str, Role]) -> list[Endpoint]:
    return [Endpoint(EndpointName(name), ADDRESSES[name], role=role) for name, role in roles.items()]


def split(spec: PolicySpec = PolicySpec()) -> Picker:  # noqa: B008 - frozen
    """Return two servers that answer and two servers that only compute prompts."""
    return a_picker(spec, on=fleet(ROLES))


def busy(picker: Picker, name: str, *, running: int, now: float) -> None:
    """Let `running` answers run on the server. A prefill would delay them."""
    page = EndpointMetrics(scraped_at=now, running=running, waiting=0)
    picker.news.observe(EndpointName(name), page, now=now)


def long_pick(picker: Picker, name: str = "p", *, now: float = 1.0, stream: bool = True) -> Pick:
    for decoder in "ab":
        busy(picker, decoder, running=8, now=now)
    return picker.pick(ask(text(name, LONG), stream=stream), now=now)


def test_long_prompt_is_computed_by_a_prefill_endpoint_that_request_names() -> None:
    pick = long_pick(split())
    chosen = pick.decision.prefill
    assert chosen is not None
    assert chosen.name in ("c", "d")
    assert pick.set_headers == ((PREFILLER, str(ADDRESSES[chosen.name])),)
    assert pick.decision.chosen in ("a", "b")
    assert chosen.uncached_tokens == 20_000
    assert chosen.cost_s < chosen.instead_of_s
    assert chosen.transfer_s == pytest.approx(0.01 + 20_000 * 131_072 / 1e10)
    assert pick.decision.predicted_s == pytest.approx(20_000 / 8000 + chosen.transfer_s)


def test_prompt_that_answering_endpoint_holds_is_not_computed_elsewhere() -> None:
    picker = split()
    first = long_pick(picker)
    picker.on_response_headers(first, status=200, served=first.destinations[0], now=1.5)
    again = long_pick(picker, now=2.0)
    assert again.decision.chosen == first.decision.chosen
    assert again.decision.matched_tokens > 19_000
    assert again.decision.prefill is None


def test_prompt_is_booked_only_at_the_prefill_endpoint_and_held_by_both() -> None:
    picker = split()
    pick = long_pick(picker)
    helper = pick.decision.prefill
    assert helper is not None
    assert undone(picker, helper.name, now=1.0) == 20_000
    assert undone(picker, pick.decision.chosen, now=1.0) == 0
    assert in_flight(picker) == {helper.name: 1, pick.decision.chosen: 1}
    assert set(picker.caches.table.match(pick.chain)) == {helper.name, pick.decision.chosen}
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=4.0)
    assert held_bytes(picker, helper.name) == held_bytes(picker, pick.decision.chosen) > 0
    assert in_flight(picker) == {pick.decision.chosen: 1}
    assert undone(picker, helper.name, now=4.0) == 0
    picker.end(pick, outcome="ended", now=5.0)
    assert in_flight(picker) == {}
    assert held_bytes(picker, helper.name) > 0
    check_picker(picker)


def test_the_prefill_endpoint_that_holds_the_beginning_is_asked_again() -> None:
    picker = split()
    first = long_pick(picker)
    assert first.decision.prefill is not None
    picker.on_response_headers(first, status=200, served=first.destinations[0], now=1.5)
    for decoder in "ab":
        busy(picker, decoder, running=8, now=2.0)
    grown = ask(text("p", LONG) + text("and more", LONG))
    later = picker.pick(grown, now=2.0).decision.prefill
    assert later is not None
    assert later.name == first.decision.prefill.name
    assert later.matched_tokens > 19_000


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(500, "ended"), (503, "ended"), (404, "ended"), (None, "aborted"), (None, "failed")],
)
def test_an_error_or_no_answer_leaves_nothing_at_either_endpoint(
    status: int | None, outcome: Outcome
) -> None:
    picker = split()
    pick = long_pick(picker)
    if status is not None:
        picker.on_response_headers(pick, status=status, served=pick.destinations[0], now=2.0)
    picker.end(pick, outcome=outcome, now=2.0)
    assert in_flight(picker) == {}
    assert picker.caches.table.entries == 0
    check_picker(picker)


def test_a_stream_that_is_let_go_leaves_the_prompt_to_the_scrapes_of_both() -> None:
    picker = split()
    pick = long_pick(picker)
    picker.detach(pick, now=1.0)
    assert in_flight(picker) == {}
    assert pick.decision.prefill is not None
    assert undone(picker, pick.decision.prefill.name, now=1.0) == 20_000
    assert picker.caches.table.match(pick.chain) == {pick.decision.prefill.name: len(pick.chain)}


@pytest.mark.parametrize(
    ("status", "restarts", "blamed"), [(500, False, "helper"), (500, True, ""), (200, False, "answering")]
)
def test_an_error_counts_against_the_process_at_work(*, status: int, restarts: bool, blamed: str) -> None:
    """If the answer begins well, its body tells of an error later."""
    picker = split()
    pick = long_pick(picker)
    assert pick.prefill is not None
    if restarts:
        pick.prefill.state.restarted(at=1.5)
    picker.on_response_headers(pick, status=status, served=pick.destinations[0], now=2.0)
    if status == 200:
        picker.on_feedback(pick, ResponseFeedback(status=500), now=2.1)
    servers = {"helper": pick.prefill.state, "answering": pick.state}
    failing = [each for each, server in servers.items() if picker.fleet.failures.share(server, now=2.1)]
    assert (failing, pick.failed) == ([blamed] if blamed else [], status == 200)


def test_another_endpoint_that_serves_request_has_no_booked_prompt_either() -> None:
    picker = split()
    pick = long_pick(picker)
    other = pick.destinations[1]
    picker.on_response_headers(pick, status=200, served=other, now=2.0)
    names = {address: name for name, address in ADDRESSES.items()}
    assert in_flight(picker) == {names[other]: 1}
    assert undone(picker, names[other], now=2.0) == 0


def test_a_prefill_endpoint_is_never_a_destination() -> None:
    picker = split()
    seen: set[Address] = set()
    for n in range(40):
        seen.update(picker.pick(ask(text(f"p{n}", SHORT)), now=1.0).destinations)
        seen.update(picker.pick(Question("h", ask().inference, overload=True), now=1.0).destinations)
    assert seen == {A, B}


def test_the_data_planes_subset_also_limits_prefill_endpoints() -> None:
    picker = split()
    for decoder in "ab":
        busy(picker, decoder, running=8, now=1.0)
    for n in range(8):
        pick = picker.pick(ask(text(f"p{n}", LONG), subset=frozenset({A, B, C})), now=1.0)
        if pick.decision.prefill is not None:
            assert pick.decision.prefill.name == "c"
    pick = picker.pick(ask(text("p", LONG), subset=frozenset({A, B})), now=1.0)
    assert pick.decision.prefill is None


def test_an_endpoint_with_both_roles_is_never_its_own_prefill_endpoint() -> None:
    picker = a_picker(on=fleet({"a": Role.BOTH, "b": Role.BOTH}))
    for name in "ab":
        busy(picker, name, running=8, now=1.0)
    for n in range(10):
        decision = picker.pick(ask(text(f"p{n}", LONG)), now=1.0).decision
        assert decision.prefill is None or decision.prefill.name != decision.chosen


@pytest.mark.parametrize(
    ("question", "roles", "failing"),
    [
        (ask(text("p", SHORT)), ROLES, ""),
        (ask(text("p", LONG), kind=ApiKind.EMBEDDINGS), ROLES, ""),
        (replace(ask(text("p", LONG)), asks_only=True), ROLES, ""),
        (ask(text("p", LONG)), {"a": Role.DECODE, "c": Role.PREFILL}, "c"),
        (ask(text("p", LONG)), dict.fromkeys("abcd", Role.UNSAID), ""),
    ],
    ids=["a short prompt", "no generation", "no headers", "only one helper, whose scrapes fail", "no roles"],
)
def test_a_prompt_is_computed_where_it_is_answered(
    question: Question, roles: Mapping[str, Role], failing: str
) -> None:
    picker = a_picker(on=fleet(roles))
    for name in roles:
        busy(picker, name, running=8, now=1.0)
    for _ in range(3):
        picker.news.observe(EndpointName(failing), None, now=1.0)
    pick = picker.pick(question, now=1.0)
    assert pick.decision.prefill is None
    assert pick.set_headers == ()
