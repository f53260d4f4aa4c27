"""The rows of the proposal for prefix-aware routing, each with the number of its row: 004-1 to 004-8. The
hashes of row 004-1 are in `tests/property/prefix_index`. The design card's own row, card-1, is the last one.
"""

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from bench.routing.bench import Run, Setting, simulate
from bench.routing.catalog import BY_NAME
from bench.routing.rows import Row
from epp.base.types import EndpointMetrics, EndpointName
from epp.config.policy import Chunks, Gain, PolicySpec, RuleName, Table
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, serve, text

ROOT = Path(__file__).parents[3]
MATCHING: list[RuleName] = ["least-cost", "affinity"]


def test_004_1_the_policy_has_the_size_of_a_chunk() -> None:
    for size in (256, 512):
        picker = a_picker(PolicySpec(chunks=Chunks(size_bytes=size, later_size_bytes=size)))
        assert picker.pick(ask(text("p", 4096)), now=0.0).decision.prompt_chunks == 4096 // size


def test_004_2_a_routed_request_adds_its_server_to_each_of_its_chunks() -> None:
    picker = a_picker()
    pick = serve(picker, ask(text("p")), now=0.0)
    (found,) = picker.caches.table.holders(pick.chain)
    assert found[1] == len(pick.chain)
    holders = [mirror.name for mirror in picker.caches.table.by_bit if mirror and found[0] & mirror.bit]
    assert holders == [pick.decision.chosen]


@pytest.mark.parametrize("rule", MATCHING)
def test_004_3_a_request_goes_to_the_longest_match(rule: RuleName) -> None:
    picker = a_picker(PolicySpec(rule=rule), on=endpoints("abc"))
    shared = text("system")
    longer = serve(picker, ask(shared + text("one")), now=0.0).decision.chosen
    others = [each.destination for each in picker.news.endpoints() if each.name != longer]
    serve(picker, ask(shared, subset=frozenset(others)), now=10.0)
    pick = picker.pick(ask(shared + text("one") + text("more")), now=20.0)
    assert (pick.decision.chosen, pick.decision.reason) == (longer, "prefix")


def test_004_4_the_entries_unused_for_longest_leave() -> None:
    picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=4500)), on=endpoints("a"))
    for n, name in enumerate(("p1", "p2", "p1", "p3")):
        serve(picker, ask(text(name)), now=float(n))
        picker.tidy(now=n + 0.9)
    held = {
        name: picker.pick(ask(text(name)), now=9.0).decision.matched_tokens for name in ("p1", "p2", "p3")
    }
    assert held["p1"] == held["p3"] > held["p2"]


def with_adapter(spec: PolicySpec) -> Picker:
    """Return a picker of which the servers a and b hold the adapter `sql`."""
    picker = a_picker(spec, on=endpoints("abcd", adapters=["sql"]))
    for name in "abcd":
        page = EndpointMetrics(
            scraped_at=0.0,
            running=0,
            waiting=0,
            kv_usage=0.0,
            active_adapters=frozenset(["sql"] * (name in "ab")),
        )
        picker.news.observe(EndpointName(name), page, now=0.0)
    return picker


def test_004_5_requests_of_an_adapter_gather_then_go_by_prefix() -> None:
    picker = with_adapter(PolicySpec(rule="affinity"))
    picks = [serve(picker, ask(text(f"p{n}"), model="sql"), now=n + 1.0) for n in range(20)]
    assert {pick.decision.chosen for pick in picks} == {"a", "b"}
    again = serve(picker, ask(text("p3"), model="sql"), now=30.0)
    assert again.decision.chosen == picks[3].decision.chosen


def test_004_5_no_request_leaves_its_adapter_below_the_threshold() -> None:
    picker = with_adapter(PolicySpec(rule="affinity"))
    chosen = [picker.pick(ask(text(f"p{n}"), model="sql"), now=0.1).decision.chosen for n in range(19)]
    assert set(chosen[:18]) == {"a", "b"}, "2,000 tokens each time, 16,000 at most"
    assert chosen[18] in {"c", "d"}, "18,000 tokens wait at both"


@pytest.mark.parametrize(
    ("gain", "reason"),
    [
        (Gain(min_match_tokens=1984), "prefix"),
        (Gain(min_match_tokens=1985), "load"),
        (Gain(min_match_ratio=0.49), "prefix"),
        (Gain(min_match_ratio=0.51), "load"),
        (Gain(min_match_tokens=1984, min_match_ratio=0.51), "load"),
    ],
)
@pytest.mark.parametrize("rule", MATCHING)
def test_004_6_a_match_counts_only_if_it_gains_enough(rule: RuleName, gain: Gain, reason: str) -> None:
    picker = a_picker(PolicySpec(rule=rule, gain=gain), on=endpoints("ab"))
    serve(picker, ask(text("system")), now=0.0)
    assert picker.pick(ask(text("system") + text("user")), now=9.0).decision.reason == reason


def simulated(rule: str, workload: str, load: float, capacity_per_s: float) -> Row:
    setting = Setting(scale=0.15)
    run = Run(workload=workload, rule=rule, load=load, seed=1, setting=setting, capacity_per_s=capacity_per_s)
    return simulate(run).row


PLACES: Mapping[str, float] = {"conversation": 6.9, "hot": 38.9}
"""Saturation in requests a second, by workload (docs/bench-routing.md)."""


@pytest.mark.slow
def test_004_7_affinity_makes_no_hot_spots_and_finds_the_caches() -> None:
    hits = {"affinity": 0.0, "least-cost": 0.0}
    for (workload, capacity_per_s), load in product(PLACES.items(), (0.5, 1.0)):
        rows = {rule: simulated(rule, workload, load, capacity_per_s) for rule in ("rr", *hits)}
        assert rows["affinity"].ttft_mean_s <= 1.3 * rows["rr"].ttft_mean_s, (workload, load)
        for rule in hits:
            hits[rule] += rows[rule].hit_ratio
    assert hits["affinity"] >= 0.9 * hits["least-cost"]


@pytest.mark.slow
def test_004_5_affinity_loads_a_quarter_of_round_robins_adapters() -> None:
    ours, turns = (simulated(rule, "lora", 0.5, 43.9) for rule in ("affinity", "rr"))
    assert ours.adapter_loads <= 0.25 * turns.adapter_loads


def test_004_8_each_alternative_has_a_row_and_the_rule_that_it_names() -> None:
    page = (ROOT / "docs/design-card.md").read_text()
    rows = dict(
        re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## The alternatives")[2], re.MULTILINE)
    )
    names = ("session", "consistent hashing with bounded loads", "radix tree", "SimHash, HashTrie")
    assert set(names) <= set(rows)
    assert {"session", "prefix-hash"} <= set(get_args(RuleName))
    assert {"sgl", "simhash", "hash-trie"} <= BY_NAME.keys()
    assert (ROOT / "docs/exact-mode.md").exists()


def test_card_1_each_library_of_the_card_is_used_where_the_page_says() -> None:
    page = (ROOT / "docs/design-card.md").read_text()
    rows = re.findall(r"^\| ([a-z-]+) \| `([^`]+)` \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "grpcio",
        "envoy-data-plane",
        "kubernetes",
        "xxhash",
        "redis",
        "vllm",
    ]
    for name, place in rows:
        module = {"grpcio": "grpc", "envoy-data-plane": "envoy_data_plane"}.get(name, name)
        assert re.search(rf'(from |import |import_module\(")({module})\b', (ROOT / place).read_text()), place
