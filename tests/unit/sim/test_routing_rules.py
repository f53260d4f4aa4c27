"""The idea of each comparison rule, on servers whose state the test sets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.routing import rules_cost as cost
from bench.routing import rules_load as load
from bench.routing import rules_prefix as prefix
from bench.routing.peer import Asked, Index, PeerRouter, Pod, Rule, World
from bench.routing.rules_learned import Learned
from model_server.core.hashing import BlockHash
from model_server.sim.prompts import Segment, block_names
from model_server.sim.request import SimRequest

BLOCK = 100


def a_world(*, in_flight: Sequence[int] = (0, 0, 0), backlog: Sequence[int] = (0, 0, 0)) -> World:
    world = World(rng=random.Random(1), block_tokens=BLOCK, capacity_blocks=1000, max_loras=4)
    for index, (requests, tokens) in enumerate(zip(in_flight, backlog, strict=True)):
        pod = Pod(f"pod-{index}", 1 << index)
        pod.in_flight, pod.backlog_tokens, pod.backlog_work = requests, tokens, tokens * 500.0
        world.pods.append(pod)
    return world


def asked(*segments: tuple[int, int], session: str = "", number: int = 0) -> Asked:
    request = SimRequest(
        request_id=number,
        segments=tuple(Segment(*s) for s in segments) or (Segment(1, 1000),),
        answer=Segment(9, 10),
        session=session,
    )
    names = block_names(request.segments, block_tokens=BLOCK)
    return Asked(request=request, names=names, num_tokens=request.num_prompt_tokens, block_tokens=BLOCK)


def choice(rule: Rule, *depths: int, what: Asked | None = None) -> int:
    found = {f"pod-{n}": depth for n, depth in enumerate(depths or (0, 0, 0))}
    return int(rule.choose(what or asked(), found, now=0.0).name[-1])


def test_least_load_takes_the_fewest_requests() -> None:
    assert choice(load.LeastLoad(a_world(in_flight=(3, 1, 2)))) == 1


def test_equal_servers_are_taken_by_chance() -> None:
    rule = load.LeastLoad(a_world())
    assert {choice(rule) for _ in range(50)} == {0, 1, 2}


def test_round_robin_takes_each_server_in_turn() -> None:
    rule = load.RoundRobin(a_world())
    assert sorted(choice(rule) for _ in range(3)) == [0, 1, 2]


def test_power_of_two_never_takes_the_most_loaded() -> None:
    rule = load.PowerOfTwo(a_world(in_flight=(9, 1, 2)))
    assert {choice(rule) for _ in range(50)} == {1, 2}


def test_a_session_stays_and_sessions_spread() -> None:
    rule = load.Session(a_world())
    chosen = {name: choice(rule, what=asked(session=name)) for name in map(str, range(30))}
    assert len(set(chosen.values())) == 3
    assert all(choice(rule, what=asked(session=name)) == pod for name, pod in chosen.items())


@pytest.mark.parametrize("rule", [load.FirstCharacters, load.SimHash])
def test_hashes_of_the_text_keep_equal_prompts_together(rule: type[load.FirstCharacters]) -> None:
    one = rule(a_world(in_flight=(9, 9, 0)))
    assert len({choice(one, what=asked((n, 200))) for n in range(40)}) == 3
    assert len({choice(one, what=asked((7, 200))) for _ in range(20)}) == 1


def test_the_head_of_a_prompt_is_its_first_characters() -> None:
    system, long, short = (1, 300), (2, 50), (3, 50)
    assert asked(system, long).head(num_chars=1200) == asked(system, short).head(num_chars=1200)
    assert asked(system, long).head(num_chars=1300) != asked(system, short).head(num_chars=1300)
    assert asked(short, long).head(num_chars=100) == asked(short, system).head(num_chars=100)


def test_bounded_loads_skip_a_full_server() -> None:
    home = choice(load.BoundedLoads(a_world()))
    loads = [1, 1, 1]
    loads[home] = 8
    assert choice(load.BoundedLoads(a_world(in_flight=loads))) != home


def test_the_trie_follows_the_match_whatever_the_load() -> None:
    assert choice(prefix.HashTrie(a_world(in_flight=(90, 0, 0))), 3, 2, 0) == 0


def test_the_exact_lookup_needs_nearly_the_whole_prompt() -> None:
    long = asked((1, 5000))
    assert choice(prefix.KvAware(a_world()), 0, 40, 45, what=long) == 1


def test_the_radix_tree_keeps_one_owner_until_loads_differ_much() -> None:
    world = a_world(in_flight=(20, 0, 0))
    rule = prefix.RadixTree(world)
    rule.placed(asked(), world.pods[0], now=0.0)
    assert choice(rule) == 0
    assert choice(rule, what=asked((5, 1000))) in {1, 2}
    world.pods[0].in_flight = 70
    assert choice(rule) in {1, 2}


def test_ray_takes_the_shortest_queue_among_the_longest_matches() -> None:
    world = a_world(in_flight=(5, 3, 0))
    rule = prefix.RayPrefix(world)
    for pod in world.pods[:2]:
        rule.placed(asked(), pod, now=0.0)
    assert choice(rule) == 1
    assert choice(rule, what=asked((5, 1000))) == 2


def test_aibrix_takes_the_best_match_that_is_not_overloaded() -> None:
    rule = prefix.Aibrix(a_world(in_flight=(8, 4, 3)), deviations=0.5)
    assert choice(rule, 9, 5, 0) == 1
    assert choice(prefix.Aibrix(a_world(in_flight=(30, 4, 3))), 9, 5, 0) == 2


def test_affinity_leaves_a_server_whose_backlog_is_over_its_budget() -> None:
    assert choice(prefix.LlmdAffinity(a_world(backlog=(100_000, 0, 0))), 9, 0, 0) == 0
    assert choice(prefix.LlmdAffinity(a_world(backlog=(400_000, 10, 0))), 9, 0, 0) == 2


def test_affinity_counts_this_requests_own_work_beside_the_backlog() -> None:
    # Both servers hold enough of the prompt. On the first the request has to compute 200 tokens behind 50,
    # on the second 100 behind 100. By backlog alone the first would win.
    assert choice(prefix.LlmdAffinity(a_world(backlog=(50, 100, 0))), 8, 9, 0) == 1


def test_holders_of_the_longest_match_share_requests_by_load() -> None:
    assert choice(prefix.DeepestHolder(a_world(in_flight=(5, 3, 0))), 9, 9, 4) == 1
    assert choice(prefix.DeepestHolder(a_world(in_flight=(5, 3, 0)))) == 2


def test_a_learning_rule_finds_out_which_server_is_slow() -> None:
    world = a_world()
    rule = Learned(world, explore=0.0)
    for number in range(90):
        what = asked((number, 1000), number=number)
        pod = world.pods[number % 3]
        rule.choose(what, dict.fromkeys(("pod-0", "pod-1", "pod-2"), 0), now=0.0)
        rule.placed(what, pod, now=0.0)
        rule.first_token(number, now=0.1 if pod.name == "pod-1" else 0.4)
    assert choice(rule) == 1
    world.pods[1].backlog_tokens = 90_000
    assert choice(rule) != 1, "a backlog has the assumed cost"


def test_dual_map_leaves_the_cached_candidate_when_it_is_too_late() -> None:
    home = choice(prefix.DualMap(a_world()), 5, 4, 3)
    backlog = [0, 0, 0]
    backlog[home] = 100_000
    moved = choice(prefix.DualMap(a_world(backlog=backlog)), 5, 4, 3)
    pair = {asked().user_head(num_chars=100) % 3, (asked().user_head(num_chars=100) >> 32) % 3}
    assert {home, moved} == pair


def test_least_work_counts_tokens_not_requests() -> None:
    assert choice(cost.LeastWork(a_world(in_flight=(9, 0, 0), backlog=(100, 900, 900)))) == 0
    assert choice(cost.LeastWork(a_world(backlog=(400, 0, 0))), 9, 0, 0) == 0


def test_lmetric_multiplies_work_by_load() -> None:
    assert choice(cost.LMetric(a_world(in_flight=(3, 0, 5))), 5, 0, 0) == 1
    assert choice(cost.LMetric(a_world(in_flight=(3, 0, 5))), 8, 0, 0) == 0


def test_a_larger_prefill_scale_makes_dynamo_stay_with_a_cached_server() -> None:
    world = a_world()
    world.pods[0].active_blocks.update(block_names((Segment(77, 600),), block_tokens=BLOCK))
    # One server has 5 blocks to compute, 6 active and 10 of this prompt: 21. The other has 10 and 10. If
    # the prefill counts twice: 26 and 30.
    assert choice(cost.Dynamo(world), 5, 0, 0) in {1, 2}
    assert choice(cost.Dynamo(world, scale=2.0), 5, 0, 0) == 0


def test_load_aware_subtracts_load_above_the_mean_from_the_match() -> None:
    assert choice(cost.LoadAware(a_world(in_flight=(4, 3, 3))), 5, 0, 0) == 0
    assert choice(cost.LoadAware(a_world(in_flight=(9, 1, 2))), 5, 0, 0) == 1


def test_predicted_ttft_counts_late_tokens_as_more_expensive() -> None:
    assert choice(cost.PredictedTtft(a_world(backlog=(600, 0, 0))), 8, 0, 0) == 0
    assert choice(cost.Mooncake(a_world(backlog=(900, 0, 0))), 8, 0, 0) in {1, 2}


def test_a_higher_price_of_own_work_stays_with_the_cache_for_longer() -> None:
    world = a_world(backlog=(1500, 0, 0))
    assert choice(cost.ExactCost(world, weight=1.0), 9, 0, 0) in {1, 2}
    assert choice(cost.ExactCost(world, weight=3.0), 9, 0, 0) == 0


def test_the_stall_price_sends_long_prompts_away_from_servers_that_write_answers() -> None:
    world = a_world(in_flight=(10, 0, 0), backlog=(0, 1200, 1200))
    assert choice(cost.ExactCost(world, stall=0.0)) == 0
    assert choice(cost.ExactCost(world, stall=0.15)) in {1, 2}


def test_the_router_books_until_the_first_token_and_the_end() -> None:
    world = World(rng=random.Random(1), block_tokens=BLOCK, capacity_blocks=1000, max_loras=4)
    router = PeerRouter(cost.LeastWork(world), world, index=Index(1000))
    router.set_servers(["pod-0"], restarted="", now=0.0)
    for number in range(2):
        router.route(asked(number=number).request, now=0.0)
    pod = world.pods[0]
    assert (pod.in_flight, pod.backlog_tokens) == (2, 1000 + 100)  # the last block is never a whole hit
    router.first_token(0, now=1.0)
    assert (pod.in_flight, pod.backlog_tokens) == (2, 100)
    for number in range(2):
        router.ended(number, failed=False, cached_tokens=0, now=2.0)
    assert (pod.in_flight, pod.backlog_tokens, pod.backlog_work) == (0, 0, 0.0)
    assert not pod.active_blocks


_CHAINS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(
    lambda path: [BlockHash("".join(path[: n + 1]).encode()) for n in range(len(path))]
)


@given(steps=st.lists(st.tuples(st.integers(0, 2), _CHAINS), max_size=30), asks=_CHAINS)
def test_an_index_that_never_evicts_matches_as_a_set_of_prefixes_would(
    steps: list[tuple[int, list[BlockHash]]], asks: list[BlockHash]
) -> None:
    pods = a_world().pods
    index, held = Index(None), [set[BlockHash](), set[BlockHash](), set[BlockHash]()]
    for number, chain in steps:
        index.record(pods[number], chain)
        held[number].update(chain)
    expected = {
        pod.name: next((n for n, name in enumerate(asks) if name not in held[i]), len(asks))
        for i, pod in enumerate(pods)
    }
    assert index.depths(asks, pods) == expected


@given(steps=st.lists(st.tuples(st.integers(0, 2), _CHAINS), max_size=30))
def test_a_bounded_index_drops_tails_before_heads(steps: list[tuple[int, list[BlockHash]]]) -> None:
    pods = a_world().pods
    index = Index(3)
    for number, chain in steps:
        index.record(pods[number], chain)
        assert index.size(pods[number]) <= 3
        assert index.depths(chain, pods)[pods[number].name] == min(3, len(chain))
