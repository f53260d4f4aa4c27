"""Turns a prompt into a chain of hashes. Each hash names the whole prefix up to its end.

Owns the schedule of chunk sizes and the scheme that roots a chain. Invariants: where a chunk ends depends on
its position alone, so the chain of a prefix is a prefix of the chain; chains of different models, adapters,
salts, schedules or scheme versions start from different roots. Every replica of the picker must compute the
same values. Caller: `epp.picker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

from xxhash import xxh3_64_intdigest

from epp.types import ChunkHash

try:
    from epp.prefix_index._chain import chain_of, sampled
except ImportError:
    COMPILED = False

    def chain_of(
        _prompt: bytes | memoryview, _seed: int, _size: int, _count: int, _later_size: int, _later: int, /
    ) -> list[int]:
        raise NotImplementedError

    def sampled(chunks: Sequence[ChunkHash], mask: int, /) -> list[ChunkHash]:
        return [chunk for chunk in chunks if not chunk & mask]
else:
    COMPILED = True
    """In C a prompt of 400 KB is hashed by one call instead of 450."""

__all__ = ["COMPILED", "ChunkSchedule", "Roots", "continued_chain", "hash_chain", "sampled"]

_SCHEME = b"prefix-gateway chain 2"
"""Increase this number whenever the canonical form of prompts or any hash of this module changes. Old hashes
then match nothing."""
_LONG_BYTES = 241
"""The least size of chunks that `_chain.c` can hash; XXH3 is another function for shorter ones."""
_KEPT_SEEDS = 64
_KEPT_CHARS = 128


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """Where chunks end: every `chunk_bytes` at first, every `later_chunk_bytes` once `later_from_bytes` are
    covered.
    """

    chunk_bytes: int = 256
    later_chunk_bytes: int = 1024
    later_from_bytes: int = 16384
    early_chunks: int = field(init=False, repr=False, compare=False)
    """Number of chunks of the first size. The last of them may end after `later_from_bytes`."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.later_chunk_bytes < 1:
            raise ValueError(f"a chunk has at least one byte: {self}")
        if self.later_from_bytes < 0:
            raise ValueError(f"later chunks begin at a position in the prompt: {self}")
        object.__setattr__(self, "early_chunks", -(-self.later_from_bytes // self.chunk_bytes))

    def chunks_in(self, n_bytes: int) -> int:
        """Return full chunks in a prompt's first `n_bytes`."""
        early_bytes = self.early_chunks * self.chunk_bytes
        if n_bytes < early_bytes:
            return n_bytes // self.chunk_bytes
        return self.early_chunks + (n_bytes - early_bytes) // self.later_chunk_bytes

    def end_bytes(self, k: int) -> int:
        """Return the bytes covered by the first `k` chunks."""
        early = self.early_chunks
        if k <= early:
            return k * self.chunk_bytes
        return early * self.chunk_bytes + (k - early) * self.later_chunk_bytes


class Roots:
    """The seeds of the first hashes of chains. Prompts that may not share a server's cache never have the
    same seed.

    Only the seeds of the last few short names without a salt are remembered, since clients may send as many
    models and salts as requests.
    """

    __slots__ = ("_kept", "_start")

    def __init__(self, schedule: ChunkSchedule, *, secret: bytes = b"") -> None:
        """secret: at most 64 bytes. Without the secret nobody can find out which texts have equal hashes."""
        sizes = (schedule.chunk_bytes, schedule.later_chunk_bytes, schedule.later_from_bytes)
        self._start = blake2b(_framed(_SCHEME, *(b"%d" % n for n in sizes)), digest_size=8, key=secret)
        self._kept: dict[str, int] = {}

    @property
    def fingerprint(self) -> str:
        """Return a number that differs if schedule, scheme or secret differ. The fingerprint reveals none of
        these.
        """
        name = self._start.copy()
        name.update(b"fingerprint")
        return name.hexdigest()

    def seed(self, *, model: str, cache_salt: str = "") -> int:
        known = self._kept.get(model) if not cache_salt else None
        if known is not None:
            return known
        root = self._start.copy()
        root.update(_framed(*(text.encode("utf-8", "surrogatepass") for text in (model, cache_salt))))
        seed = int.from_bytes(root.digest(), "little")
        if not cache_salt and len(model) <= _KEPT_CHARS:
            if len(self._kept) >= _KEPT_SEEDS:
                self._kept.clear()
            self._kept[model] = seed
        return seed


def _framed(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists of parts never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def hash_chain(prompt: bytes, *, seed: int, schedule: ChunkSchedule) -> list[ChunkHash]:
    """Return the hashes of the prompt's full chunks, each seeded with the one before, the first with
    `seed`.
    """
    size, count = schedule.chunk_bytes, schedule.chunks_in(len(prompt))
    if COMPILED and size >= _LONG_BYTES and schedule.later_chunk_bytes >= _LONG_BYTES:
        early = min(count, schedule.early_chunks)
        return cast(
            "list[ChunkHash]",
            chain_of(prompt, seed, size, early, schedule.later_chunk_bytes, count - early),
        )
    last = schedule.end_bytes(count)
    early_end = min(schedule.early_chunks * size, last)
    chain = [
        seed := xxh3_64_intdigest(prompt[start : start + size], seed) for start in range(0, early_end, size)
    ]
    if early_end < last:
        size, view = schedule.later_chunk_bytes, memoryview(prompt)  # slicing bytes would copy them
        chain += [
            seed := xxh3_64_intdigest(view[start : start + size], seed)
            for start in range(early_end, last, size)
        ]
    return cast("list[ChunkHash]", chain)


def continued_chain(
    chain: Sequence[ChunkHash], rest: bytes, *, seed: int, schedule: ChunkSchedule
) -> list[ChunkHash]:
    """Return the chain of a longer prompt. rest: the prompt's bytes after the last chunk of `chain`.
    `seed` is for an empty chain.
    """
    grown, covered, at = list(chain), schedule.end_bytes(len(chain)), 0
    while (end := schedule.end_bytes(len(grown) + 1) - covered) <= len(rest):
        grown.append(ChunkHash(xxh3_64_intdigest(rest[at:end], grown[-1] if grown else seed)))
        at = end
    return grown
