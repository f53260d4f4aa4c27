"""Other projects' rules. Each has cases that were worked out by hand from its source.

A row is a state of three servers and the servers that the source may choose. The prompt has 1,000 tokens
in 10 blocks of 100. Where the source takes the first of equal servers, ours takes one by chance, so that
no rule gains or loses by the order of names.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bench.routing import rules
from bench.routing.peer import Asked, HoldingRouter, Index, Pod, Rule, World
from model_server.sim.engine import EngineShape, SimEngine, Snapshot, snapshot
from model_server.sim.fleet import WAITS
from model_server.sim.prompts import Segment, block_names
from model_server.sim.request import SimRequest

NONE = (0, 0, 0)
BLOCK = 100


def a_world(*, in_flight: Sequence[int] = (0, 0, 0), backlog: Sequence[int] = (0, 0, 0)) -> World:
    world = World(rng=random.Random(1), block_tokens=BLOCK, capacity_blocks=1000)
    for index, (requests, tokens) in enumerate(zip(in_flight, backlog, strict=True)):
        pod = Pod(f"pod-{index}", 1 << index)
        pod.in_flight, pod.backlog_tokens = requests, tokens
        world.pods.append(pod)
    return world


def asked(*segments: tuple[int, int], number: int = 0) -> Asked:
    request = SimRequest(
        request_id=number,
        segments=tuple(Segment(*s) for s in segments) or (Segment(1, 1000),),
        answer=Segment(9, 10),
    )
    names = block_names(request.segments, block_tokens=BLOCK)
    return Asked(request=request, names=names, num_tokens=request.num_prompt_tokens)


def choice(rule: Rule, *depths: int, what: Asked | None = None) -> int:
    found = {f"pod-{n}": depth for n, depth in enumerate(depths or (0, 0, 0))}
    return int(rule.choose(what or asked(), found, now=0.0).name[-1])


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
    """Blocks of the prompt that each server holds."""
    waiting: tuple[int, int, int] = NONE
    """Requests in the server's queue, as on its page."""
    kv_usage: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The share of the KV cache in use, as on the server's page."""


def a_page(*, waiting: int = 0, kv_usage: float = 0.0) -> Snapshot:
    return replace(snapshot(SimEngine(EngineShape()), now=0.0), waiting=waiting, kv_usage=kv_usage)


def world_of(case: Case) -> World:
    world = a_world(in_flight=case.loads, backlog=case.backlog)
    for pod, waiting, kv_usage in zip(world.pods, case.waiting, case.kv_usage, strict=True):
        pod.page = a_page(waiting=waiting, kv_usage=kv_usage)
    return world


def all_choices(rule: Rule, case: Case) -> set[int]:
    return {choice(rule, *case.depths) for _ in range(60)}


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


@pytest.mark.parametrize("case", SGLANG, ids=lambda case: case.why)
def test_sglang_chooses_as_its_source_does(case: Case) -> None:
    world = a_world(in_flight=case.loads)
    rule = rules.RadixTree(world)
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
    Case("less than no prefill is none", {0}, depths=(10, 9, 9)),
]  # fmt: skip


# llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity/plugin.go at
# 066c20ea107e: Filter, endpointTTFT; 0.80, 18,000 ms, 15,928 tokens/s. Among the servers that the filter
# keeps, the least sum of tokens in flight and own uncached tokens wins (token_load.go at ebab687).
LLMD = [
    Case("0.8 holds, 0.7 does not", {0}, depths=(8, 7, 0)),
    Case("nobody holds enough: least tokens", {1}, backlog=(500, 0, 900), depths=(7, 6, 7)),
    Case("18,000 ms behind: it stays", {0}, backlog=(286_704, 0, 0), depths=(8, 0, 0)),
    Case("more than that: all are kept", {1}, backlog=(286_720, 0, 0), depths=(8, 7, 0)),
    Case("its own uncached tokens count beside those in flight", {1}, backlog=(50, 100, 0), depths=(8, 9, 0)),
    Case("all hold it: no gate", {2}, backlog=(400_000, 10, 0), depths=(9, 9, 9)),
]


# llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/scorer/lmetric/lmetric.go at 1fee9c80c90f: cost.
LMETRIC = [
    Case("500 x 4 against 1000 x 1", {1}, loads=(3, 0, 5), depths=(5, 0, 0)),
    Case("200 x 4 against 1000 x 1", {0}, loads=(3, 0, 5), depths=(8, 0, 0)),
    Case("equal products: by chance", {0, 1}, loads=(1, 0, 5), depths=(5, 0, 0)),
    Case("tokens in flight do not count", {0}, backlog=(90_000, 0, 0), depths=(1, 0, 0)),
]


# vllm-project/aibrix pkg/plugins/gateway/algorithms/pd/prefill_scorer.go at 8b4599225ee7 (ScorePod of
# prefixCacheScorer); gate: loadImbalanceSelectPrefillPod in pd_disaggregation.go at f354f2380f2c.
AIBRIX_PD = [
    Case("5 + 3/3 against 10 and 10 + 1/3", {0}, loads=(3, 0, 1), depths=(5, 0, 0)),
    Case("9 + 1 against 10: by chance", {0, 1, 2}, loads=(3, 0, 0), depths=(1, 0, 0)),
    Case("16 more is in balance: 1 + 1 against 10", {0}, loads=(16, 0, 0), depths=(9, 0, 0)),
    Case("17 more: least load", {1, 2}, loads=(17, 0, 0), depths=(9, 0, 0)),
]


# llm-d/llm-d-router pkg/epp/framework/plugins/scheduling/scorer: queuedepth/queue.go and
# kvcacheutilization/kvcache_utilization.go at 443627e4d29f, prefix/plugin.go at bc7d10be32bf; weights
# 3, 2, 2.
WEIGHTED = [
    Case("1.5 + 2 + 2 against 2 + 2", {0}, depths=(5, 0, 0)),
    Case("the only one that waits: 1.5 + 0 + 2 against 4", {1, 2}, waiting=(1, 0, 0), depths=(5, 0, 0)),
    Case("queues count between the least and the most", {0}, waiting=(1, 9, 0), depths=(5, 0, 0)),
    Case("1.5 + 2 + 0.6 against 4", {0}, kv_usage=(0.7, 0, 0), depths=(5, 0, 0)),
    Case("1.5 + 2 + 0.4 against 4", {1, 2}, kv_usage=(0.8, 0, 0), depths=(5, 0, 0)),
    Case("requests in flight do not count", {0, 1, 2}, loads=(9, 0, 0)),
]


# sgl-project/sglang experimental/sgl-router/src/policies/cache_aware_zmq.rs at 080dd47dba55: select,
# is_imbalanced; 0.5, 32 and 1.1.
SGL_ZMQ = [
    Case("over half: the deepest holder", {0}, loads=(9, 0, 0), depths=(6, 4, 0)),
    Case("half is not over half: least load", {1, 2}, loads=(9, 0, 0), depths=(5, 0, 0)),
    Case("of equal holders the less loaded", {1}, loads=(3, 2, 0), depths=(8, 8, 7)),
    Case("32 more is in balance", {0}, loads=(32, 0, 0), depths=(9, 0, 0)),
    Case("33 more: least load", {1, 2}, loads=(33, 0, 0), depths=(9, 0, 0)),
    Case("33 more, but 1.1 times: in balance", {0}, loads=(363, 330, 330), depths=(9, 0, 0)),
]
SOURCES: dict[Any, list[Case]] = {
    rules.Aibrix: AIBRIX,
    rules.Dynamo: DYNAMO,
    rules.LlmdAffinity: LLMD,
    rules.LMetric: LMETRIC,
    rules.AibrixPd: AIBRIX_PD,
    rules.WeightedSum: WEIGHTED,
    rules.DeepestHolder: SGL_ZMQ,
}


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule.__name__}: {case.why}")
        for rule, cases in SOURCES.items()
        for case in cases
    ],
)
def test_a_rival_chooses_as_its_source_does(rule: Any, case: Case) -> None:
    assert all_choices(rule(world_of(case)), case) == case.may


# ai-dynamo/dynamo lib/kv-router/src/scheduling/policy_config.rs at fb5f04b38cf1: worker_is_busy; queue.rs:
# all eligible workers; first come, first served.
@pytest.mark.parametrize(
    ("backlog", "waits"),
    [
        pytest.param((0, 0, 0), False, id="idle"),
        pytest.param((90_000, 90_000, 1000), False, id="1,000 is not over 1,000"),
        pytest.param((90_000, 90_000, 1001), True, id="all are over 1,000"),
    ],
)
def test_dynamo_holds_a_request_while_all_servers_are_busy(
    backlog: tuple[int, int, int], *, waits: bool
) -> None:
    world = a_world(backlog=backlog)
    router = HoldingRouter(rules.Dynamo(world), world, index=Index(None), busy_tokens=1000)
    first, second = asked((1, 900), number=1).request, asked((2, 900), number=2).request
    assert (router.route(first, now=0.0) == WAITS) == waits
    assert not waits or not list(router.decided(now=0.0))
    if waits:
        router.route(second, now=0.0)
        world.pods[2].backlog_tokens = 500
        assert list(router.decided(now=1.0)) == [(1, "pod-2")], "the first request fills the server again"
