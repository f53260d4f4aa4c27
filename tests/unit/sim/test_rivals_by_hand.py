"""Other projects' rules, each held to cases that were worked out by hand from its source.

A row is a state of three servers and the servers that the source may choose. The prompt has 1,000 tokens in
10 blocks of 100. Where the source breaks ties by the first index, ours does by chance, so that no rule gains
or loses by an order of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.routing import rules_cost as cost
from bench.routing import rules_prefix as prefix
from bench.routing.peer import Rule
from tests.unit.sim.test_routing_rules import a_world, asked, choice

NONE = (0, 0, 0)


@dataclass(frozen=True)
class Case:
    why: str
    may: set[int]
    """Servers that the source may choose."""
    loads: tuple[int, int, int] = NONE
    """Requests in flight."""
    backlog: tuple[int, int, int] = NONE
    """Prompt tokens in flight and not computed."""
    depths: tuple[int, int, int] = NONE
    """Blocks of the prompt that each holds."""
    settings: dict[str, Any] = field(default_factory=dict)


def all_choices(rule: Rule, case: Case) -> set[int]:
    return {choice(rule, *case.depths) for _ in range(60)}


def rows(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.why)


# vllm-project/aibrix pkg/plugins/gateway/algorithms/prefix_cache.go at 01de8a514d00: routeOriginal,
# getTargetPodListOnLoadImbalance, getTargetPodFromMatchedPodsFromCounts; factor 2.0, gap 8, one standard
# deviation.
AIBRIX = [
    Case("nothing matches: fewest requests", {2}, loads=(3, 2, 1)),
    Case("the longest match", {0}, depths=(5, 3, 0)),
    Case("equal matches: fewer requests", {1}, loads=(2, 1, 3), depths=(5, 5, 0)),
    Case("8 is over 5 + 2.2: the next match", {1}, loads=(8, 4, 3), depths=(9, 5, 0)),
    Case("the only match is over the limit: fewest requests", {1, 2}, loads=(9, 1, 1), depths=(9, 0, 0)),
    Case("20 is not over 2 (9 + 1): in balance, the next match", {1}, loads=(20, 4, 3), depths=(9, 5, 0)),
    Case("30 is over 2 (12.3 + 1): only the least loaded may match", {2}, loads=(30, 4, 3), depths=(9, 5, 0)),
    Case("out of balance: the match of the least loaded counts", {2}, loads=(30, 3, 3), depths=(9, 0, 4)),
    Case("7 more than the least is no imbalance", {0}, loads=(0, 7, 0), depths=(9, 0, 0)),
]


@rows(AIBRIX)
def test_aibrix(case: Case) -> None:
    assert all_choices(prefix.Aibrix(a_world(in_flight=case.loads)), case) == case.may


# sgl-project/sglang sgl-model-gateway/src/policies/cache_aware.rs at 053b63ff26df: select_worker;
# 0.3, 64 and 1.5. Here `depths` is how much of the prompt was sent to server 0 before.
SGLANG = [
    Case("more than 0.3 matches: its server", {0}, depths=(4, 0, 0)),
    Case("0.3 is not more than 0.3: fewest requests", {1}, loads=(2, 0, 1), depths=(3, 0, 0)),
    Case("64 more is no imbalance", {0}, loads=(64, 0, 0), depths=(9, 0, 0)),
    Case("65 more and over 1.5 times: fewest requests", {1, 2}, loads=(65, 0, 0), depths=(9, 0, 0)),
    Case("70 more but 1.5 times exactly: in balance", {0}, loads=(210, 140, 140), depths=(9, 0, 0)),
    Case("66 more and over 1.5 times 100", {1, 2}, loads=(166, 100, 100), depths=(9, 0, 0)),
]


@rows(SGLANG)
def test_sglang(case: Case) -> None:
    world = a_world(in_flight=case.loads)
    rule = prefix.RadixTree(world)
    same = 100 * case.depths[0]
    rule.placed(asked((1, same), (2, 1000 - same)), world.pods[0], now=0.0)
    what = asked((1, same), (3, 1000 - same))
    assert {choice(rule, what=what) for _ in range(60)} == case.may


# ai-dynamo/dynamo lib/kv-router/src/scheduling/selector/default.rs at 07a6c9ce3bb0:
# worker_logit, minimum_cost_index (ties by chance).
DYNAMO = [
    Case("5 + 10 blocks against 10 + 10", {0}, depths=(5, 0, 0)),
    Case("a backlog of 4 blocks: 9 + 10 against 20", {0}, backlog=(400, 0, 0), depths=(5, 0, 0)),
    Case("a backlog of 6 blocks: 11 + 10 against 20", {1, 2}, backlog=(600, 0, 0), depths=(5, 0, 0)),
    Case("requests do not count by default", {0, 1, 2}, loads=(9, 0, 0)),
    Case("a weight of requests: 15 + 6 against 20", {1, 2}, loads=(6, 0, 0), depths=(5, 0, 0), settings={"load_weight": 1.0}),
    Case("a scale of 0.5: 5.5 + 10 against 15", {1, 2}, backlog=(600, 0, 0), depths=(5, 0, 0), settings={"scale": 0.5}),
    Case("less than no prefill is none", {0}, depths=(10, 9, 9)),
]  # fmt: skip


@rows(DYNAMO)
def test_dynamo(case: Case) -> None:
    world = a_world(in_flight=case.loads, backlog=case.backlog)
    assert all_choices(cost.Dynamo(world, **case.settings), case) == case.may


# llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity/plugin.go at
# 066c20ea107e: Filter, endpointTTFT; 0.80, 18,000 ms, 15,928 tokens/s. Of what it keeps: least tokens in
# flight and own uncached tokens (token_load.go at ebab687).
LLMD = [
    Case("0.8 holds, 0.7 does not", {0}, depths=(8, 7, 0)),
    Case("nobody holds enough: least tokens", {1}, backlog=(500, 0, 900), depths=(7, 6, 7)),
    Case("18,000 ms behind: it stays", {0}, backlog=(286_704, 0, 0), depths=(8, 0, 0)),
    Case("more than that: all are kept", {1}, backlog=(286_720, 0, 0), depths=(8, 7, 0)),
    Case("its own uncached tokens count beside those in flight", {1}, backlog=(50, 100, 0), depths=(8, 9, 0)),
    Case("all hold it: no gate", {2}, backlog=(400_000, 10, 0), depths=(9, 9, 9)),
]


@rows(LLMD)
def test_llmd_affinity(case: Case) -> None:
    assert all_choices(prefix.LlmdAffinity(a_world(backlog=case.backlog)), case) == case.may


# llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/scorer/lmetric/lmetric.go at 1fee9c80c90f: cost.
LMETRIC = [
    Case("500 x 4 against 1000 x 1", {1}, loads=(3, 0, 5), depths=(5, 0, 0)),
    Case("200 x 4 against 1000 x 1", {0}, loads=(3, 0, 5), depths=(8, 0, 0)),
    Case("equal products: by chance", {0, 1}, loads=(1, 0, 5), depths=(5, 0, 0)),
    Case("tokens in flight do not count", {0}, backlog=(90_000, 0, 0), depths=(1, 0, 0)),
]


@rows(LMETRIC)
def test_lmetric(case: Case) -> None:
    assert all_choices(cost.LMetric(a_world(in_flight=case.loads, backlog=case.backlog)), case) == case.may
