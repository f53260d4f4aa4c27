"""The most frequent beginnings of prompts, within a bound, where old requests count less."""

from __future__ import annotations

from epp.base.types import ChunkHash, EndpointName
from epp.observe.misses.heat import Heat


def test_the_hottest_of_too_many_beginnings_are_kept() -> None:
    heat = Heat()
    for n in range(2000):
        for name in (0, n + 1):
            heat.note([ChunkHash(name)], EndpointName("a"), prompt_tokens=10, matched_tokens=0, now=n / 1000)
        heat.check_integrity()
    groups = heat.hottest(1000)
    assert (groups[0].chain, groups[0].requests) == ([0], 2000)
    assert groups[1].requests == 1
    assert 2000 in [group.chain[0] for group in groups], "the newest prompt was dropped"
    assert 384 <= len(groups) <= 512


def note(heat: Heat, *chain: int, server: str = "a", now: float = 0.0) -> None:
    chunks = [ChunkHash(chunk) for chunk in chain]
    heat.note(chunks, EndpointName(server), prompt_tokens=10, matched_tokens=4, now=now)


def test_requests_with_the_same_first_eight_chunks_are_one_group() -> None:
    heat = Heat()
    note(heat, *range(8), 100)
    note(heat, *range(8), 200, 300, server="b")
    note(heat, *range(7))
    note(heat)
    whole, short = heat.hottest(10)
    assert (whole.chain, whole.requests) == (list(range(8)), 2)
    assert (whole.prompt_tokens, whole.matched_tokens, whole.sent) == (20, 8, {"a": 1, "b": 1})
    assert short.chain == list(range(7))


def test_counts_are_halved_every_minute_and_cold_groups_are_dropped() -> None:
    heat = Heat()
    for _ in range(4):
        note(heat, 1, now=60.0)
    note(heat, 2, now=60.0)
    for minute in (2, 3, 4):
        note(heat, 3, now=60.0 * minute)
        heat.check_integrity()
    groups = {group.chain[0]: group.requests for group in heat.hottest(10)}
    assert groups == {1: 0.5, 3: 1.75}


def test_no_more_than_64_servers_of_a_group_are_remembered() -> None:
    heat = Heat()
    for n in range(100):
        note(heat, 1, server=f"s{n}")
    note(heat, 1, server="s0")
    heat.check_integrity()
    (group,) = heat.hottest(10)
    assert (group.requests, len(group.sent), group.sent[EndpointName("s0")]) == (101, 64, 2)
