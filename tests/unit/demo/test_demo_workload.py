"""The demo's workload: the seed determines it, every rule gets the same work, and conversations grow with
each turn.
"""

from __future__ import annotations

from bench.demo.serving import made_up
from bench.demo.workload import Shape, make_workload

SHAPE = Shape.of(servers=4, requests=264)


def test_same_seed_gives_same_workload_and_another_seed_another_workload() -> None:
    assert make_workload(SHAPE, seed=1) == make_workload(SHAPE, seed=1)
    assert make_workload(SHAPE, seed=1) != make_workload(SHAPE, seed=2)


def test_turn_sends_conversation_so_far_after_its_tenants_system_prompt() -> None:
    workload = make_workload(SHAPE, seed=1)
    user = workload.users[3]
    first, second = next(c for c in user.conversations if len(c) > 1)[:2]
    before = workload.body(user, [], first, nonce="abc")
    after = workload.body(user, [(first.message, "an answer")], second, nonce="abc")
    assert after["messages"][: len(before["messages"])] == before["messages"]
    assert [m["role"] for m in after["messages"]] == ["system", "user", "assistant", "user"]
    assert workload.systems[user.tenant] in after["messages"][0]["content"]
    assert after["cache_salt"] == f"tenant-{user.tenant}"


def test_the_prefixes_in_use_fit_four_caches_but_not_two() -> None:
    cache = made_up().cache_tokens

    live = make_workload(SHAPE, seed=1).live_prefix_tokens
    assert 2 * cache < live < 4 * cache
