"""The reasons why prompt tokens were missed: one test for each cause, with the real picker."""

import random
from dataclasses import replace

import msgspec
import pytest

from epp.base.types import EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import Gain, PolicySpec, Table
from epp.observe.misses import EVICTED, Misses
from epp.picker.events import Proved
from tests.harness.steps import steps
from tests.invariants.misses import check_misses
from tests.unit.observe.misses.answered import served, watched
from tests.unit.picker.picker_questions import A, B, ask, endpoints, text


def missed(misses: Misses) -> dict[str, float]:
    """Return the missed tokens by cause, as shares of all prompt tokens."""
    misses.work(steps=10**9)
    check_misses(misses)
    account = misses.over(900.0, now=900.0)
    total, tokens = account.total(), {c.name: sum(by.values()) for c, by in account.missed.items()}
    whole = sum(tokens.values())
    assert whole == pytest.approx(total["prompt_tokens"] - total["matched_tokens"], rel=0.01), (
        "every token has one cause"
    )
    return {name: missed / whole for name, missed in tokens.items() if missed}


def test_a_first_prompt_is_new_except_for_its_end_that_is_in_no_chunk() -> None:
    picker, misses = watched()
    served(picker, text("one", 8100), now=1.0)
    assert missed(misses) == {"new": pytest.approx(0.98, abs=0.01), "tail": pytest.approx(0.02, abs=0.01)}


def test_tokens_that_a_full_server_dropped_count_as_evicted() -> None:
    spec = PolicySpec(table=Table(default_capacity_tokens=5000))
    picker, misses = watched(spec)
    for n, name in enumerate(("one", "two", "three", "four", "one")):
        served(picker, text(name, 8192), now=float(n))
    shares = missed(misses)
    assert shares["evicted"] == pytest.approx(0.2, abs=0.03)
    assert list(misses.over(900.0, now=9.0).missed[EVICTED]) == ["a"]


def test_tokens_that_a_server_held_before_its_restart_count_as_restarted() -> None:
    picker, misses = watched()
    served(picker, text("one", 8192), now=1.0)
    for finished, now in ((9.0, 2.0), (0.0, 3.0)):
        page = EndpointMetrics(
            scraped_at=now, finished=finished, prompt_tokens=finished, generated_tokens=finished
        )
        picker.news.observe(EndpointName("a"), page, now=now)
    served(picker, text("one", 8192), now=4.0)
    assert missed(misses)["restarted"] == pytest.approx(0.5, abs=0.02)


def test_tokens_of_a_pod_whose_name_another_got_count_as_restarted() -> None:
    picker, misses = watched()
    served(picker, text("one", 8192), now=1.0)
    picker.news.set_endpoints([], now=2.0)
    picker.news.set_endpoints([replace(each, incarnation="2") for each in endpoints("a")], now=3.0)
    served(picker, text("one", 8192), now=4.0)
    assert missed(misses)["restarted"] == pytest.approx(0.5, abs=0.02)


def test_a_rule_without_prefixes_sends_prompts_to_other_servers() -> None:
    picker, misses = watched(PolicySpec(rule="round-robin"), "ab")
    assert served(picker, text("one", 8192), now=1.0) != served(picker, text("one", 8192), now=2.0)
    assert missed(misses)["elsewhere"] == pytest.approx(0.5, abs=0.02)


def test_a_match_below_the_threshold_counts_as_too_little() -> None:
    spec = PolicySpec(rule="round-robin", gain=Gain(min_match_tokens=100_000))
    picker, misses = watched(spec, "ab")
    served(picker, text("one", 8192), now=1.0)
    served(picker, text("one", 8192), now=2.0)
    assert missed(misses)["low_gain"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("rule", ["least-cost", "round-robin"])
def test_no_server_is_unavailable_however_prompts_end(rule: str) -> None:
    """Cached tokens are rounded down to blocks, and chunks do not end where blocks do."""
    spec = msgspec.convert({"rule": rule}, PolicySpec)
    picker, misses = watched(spec, "abc")
    for name in "abc":
        page = EndpointMetrics(scraped_at=0.5, block_size=16, capacity_tokens=100_000)
        picker.news.observe(EndpointName(name), page, now=0.5)
    rng, histories = random.Random(1), [text(f"system {n}", 3000 + 37 * n) for n in range(20)]
    for turn in range(400):
        which = rng.randrange(len(histories))
        histories[which] += text(f"{turn}", rng.randrange(50, 900))
        served(picker, histories[which], now=1.0 + turn)
        misses.work(steps=1)
    assert "unavailable" not in missed(misses)


def test_a_server_that_was_not_a_candidate_is_named() -> None:
    picker, misses = watched(names="ab")
    first = served(picker, text("one", 8192), now=1.0)
    elsewhere = [e.address for e in picker.news.endpoints() if e.name != first]
    served(picker, text("one", 8192), subset=frozenset(elsewhere), now=2.0)
    assert missed(misses)["unavailable"] == pytest.approx(0.5, abs=0.02)


def test_misses_of_a_body_that_was_not_read_count_as_unread() -> None:
    picker, misses = watched()
    request = ask(b"", body_bytes=40_000)
    unread = InferenceRequest(kind=request.inference.kind, model="m", unread="costly_body")
    pick = picker.pick(type(request)("r", unread, body_bytes=40_000), now=1.0)
    picker.on_response_headers(pick, status=200, served=None, now=2.0)
    picker.end(pick, outcome="ended", now=2.0)
    assert missed(misses) == {"unread": 1.0}


@pytest.mark.parametrize("size", [500, 400_000])
def test_too_many_requests_at_once_are_skipped_by_their_size(size: int) -> None:
    picker, misses = watched()
    pick = picker.pick(ask(text("one", size)), now=1.0)
    kept = 2**18 // (256 + len(pick.chain))
    for _ in range(kept + 100):
        misses.on_event(Proved(1.0, pick, None))
        check_misses(misses)
    assert misses.skipped == 100


def test_one_portion_of_work_ends_after_its_steps() -> None:
    picker, misses = watched()
    for n in range(10):
        served(picker, text(f"{n}"), now=float(n))
    portions = 1
    while misses.work(steps=400):
        portions += 1
    assert portions == 5, "two requests each"


def test_explaining_costs_little_more_than_the_picks() -> None:
    """Each prompt is on its way to two servers before its misses are explained."""
    picker, misses = watched(names="ab")
    prompts = [text(str(n), 400_000) for n in range(20)]

    def pick_all() -> None:
        for address in (A, B):
            for prompt in prompts:
                picker.pick(ask(prompt, subset=frozenset([address])), now=1.0)

    picks = steps(pick_all)
    assert steps(lambda: missed(misses)) < 20 * picks
