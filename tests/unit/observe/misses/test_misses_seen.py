"""The sample of chunks that remembers where each chunk was sent, and the most frequent beginnings of prompts,
both in bounded memory.
"""

from __future__ import annotations

import random

import pytest

from epp.base.types import ChunkHash, EndpointName
from epp.observe.misses.seen import Heat, Seen, SentPrompt

A = EndpointName("a")
MOST = 32_768


def test_memory_is_bounded_and_the_sample_stays_the_same_for_every_chunk() -> None:
    seen, rng = Seen(), random.Random(1)
    chunks = [ChunkHash(rng.getrandbits(64)) for _ in range(20 * MOST)]
    for n in range(0, len(chunks), 1000):
        seen.note(chunks[n : n + 1000], SentPrompt(A, 0, n / 1000))
        if n % 50_000 == 0:
            seen.check_integrity()
    assert seen.one_in == 32
    sampled = seen.sampled(chunks)
    assert len(sampled) == pytest.approx(len(chunks) / 32, rel=0.05)
    assert all(seen.get(chunk) is not None for chunk in sampled), "no prompt of the sample is forgotten"


def test_old_chunks_are_dropped_before_the_sample_is_made_smaller() -> None:
    seen = Seen()
    for n in range(0, 4 * MOST, 1024):
        seen.note([ChunkHash(n + k) for k in range(1024)], SentPrompt(A, 0, n / 4.0))
    seen.check_integrity()
    assert seen.one_in == 1
    assert seen.get(ChunkHash(4 * MOST - 1)) is not None
    assert seen.get(ChunkHash(1)) is None


def test_a_chunk_is_remembered_at_the_last_server_that_got_it() -> None:
    seen = Seen()
    first, second = (SentPrompt(EndpointName(name), 0, at) for name, at in (("a", 1.0), ("b", 2.0)))
    seen.note([ChunkHash(1), ChunkHash(2)], first)
    seen.note([ChunkHash(2)], second)
    assert [seen.get(ChunkHash(n)) for n in (1, 2, 3)] == [first, second, None]
    assert seen.none_of([ChunkHash(3)])
    assert not seen.none_of([ChunkHash(3), ChunkHash(1)])


def test_a_chunk_that_is_sent_again_is_not_the_oldest_any_more() -> None:
    seen = Seen()
    seen.note([ChunkHash(n) for n in range(MOST)], SentPrompt(A, 0, 0.0))
    seen.note([ChunkHash(1)], SentPrompt(A, 0, 5000.0))
    seen.note([ChunkHash(MOST)], SentPrompt(A, 0, 5001.0))
    seen.check_integrity()
    assert seen.get(ChunkHash(1)) is not None
    assert seen.get(ChunkHash(2)) is None


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
