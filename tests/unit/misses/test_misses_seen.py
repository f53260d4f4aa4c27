"""The sample of chunks that remembers where each chunk was sent, in bounded memory."""

from __future__ import annotations

import random

import pytest

from epp.misses.seen import Seen, Sent
from epp.types import ChunkHash, EndpointName


def test_memory_is_bounded_and_the_sample_stays_the_same_for_every_chunk() -> None:
    seen = Seen(most=1000)
    rng = random.Random(1)
    chunks = [ChunkHash(rng.getrandbits(64)) for _ in range(20_000)]
    for n, chunk in enumerate(chunks):
        seen.note([chunk], Sent(EndpointName("a"), 0, float(n) / 100))
        if n % 200 == 0:
            seen.check_integrity()
    assert seen.one_in == 32
    sampled = seen.sampled(chunks)
    assert len(sampled) == pytest.approx(20_000 / 32, rel=0.15)
    assert all(seen.get(chunk) is not None for chunk in sampled), "no prompt of the sample is forgotten"


def test_old_chunks_go_before_the_sample_is_made_smaller() -> None:
    seen = Seen(most=100, old_s=10.0)
    for n in range(1000):
        seen.note([ChunkHash(n)], Sent(EndpointName("a"), 0, float(n)))
    assert seen.one_in == 1
    assert seen.get(ChunkHash(999)) is not None
    assert seen.get(ChunkHash(1)) is None


def test_a_chunk_is_remembered_at_the_last_server_that_got_it() -> None:
    seen = Seen()
    first, second = (Sent(EndpointName(name), 0, at) for name, at in (("a", 1.0), ("b", 2.0)))
    seen.note([ChunkHash(1), ChunkHash(2)], first)
    seen.note([ChunkHash(2)], second)
    assert [seen.get(ChunkHash(n)) for n in (1, 2, 3)] == [first, second, None]
    assert seen.none_of([ChunkHash(3)])
    assert not seen.none_of([ChunkHash(3), ChunkHash(1)])


def test_a_chunk_that_is_sent_again_is_not_the_oldest_any_more() -> None:
    seen = Seen(most=4, old_s=10.0)
    for at, chunk in enumerate((1, 2, 3, 4)):
        seen.note([ChunkHash(chunk)], Sent(EndpointName("a"), 0, float(at)))
    seen.note([ChunkHash(1)], Sent(EndpointName("a"), 0, 50.0))
    seen.note([ChunkHash(5)], Sent(EndpointName("a"), 0, 51.0))
    seen.check_integrity()
    assert seen.get(ChunkHash(1)) is not None
    assert seen.get(ChunkHash(2)) is None
