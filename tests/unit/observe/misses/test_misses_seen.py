"""The sample of chunks that remembers where each chunk was sent, in bounded memory."""

from __future__ import annotations

import random

import pytest

from epp.base.types import ChunkHash, EndpointName
from epp.observe.misses.seen import Seen, SentPrompt

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
