"""Remembers the servers to which chunks of prompts were sent, in bounded memory. Pure.

`Seen` keeps a sample of all chunks, chosen by their hashes. While there is room, every chunk is kept. When
the memory is full, the oldest quarter is removed if it is old enough. Otherwise half of all chunks is removed
by their hashes, and chunks with such hashes are never kept again. So every occurrence of a chunk is in the
sample or none is, and shares stay correct (SHARDS, Waldspurger et al. 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from epp.base.types import ChunkHash, EndpointName

_MOST: Final = 32_768
_OLD_S: Final = 3600.0


class SentPrompt(NamedTuple):
    """The last server that a chunk was newly sent to."""

    server: EndpointName
    process: int
    at: float


class Seen:
    def __init__(self) -> None:
        self._sent: dict[ChunkHash, SentPrompt] = {}
        self._mask = 0

    @property
    def one_in(self) -> int:
        """Return n: one in n chunks is in the sample."""
        return self._mask + 1

    def sampled(self, chunks: Sequence[ChunkHash]) -> Sequence[ChunkHash]:
        mask = self._mask
        return [chunk for chunk in chunks if not chunk & mask] if mask else chunks

    def get(self, chunk: ChunkHash) -> SentPrompt | None:
        return self._sent.get(chunk)

    def none_of(self, chunks: Sequence[ChunkHash]) -> bool:
        """Return whether none of these chunks was ever sent anywhere, as far as the sample shows."""
        return self._sent.keys().isdisjoint(self.sampled(chunks))  # only sampled chunks are remembered

    def note(self, chunks: Sequence[ChunkHash], sent: SentPrompt) -> None:
        chosen = self.sampled(chunks)
        if not self._sent.keys().isdisjoint(chosen):
            for chunk in chosen:
                self._sent.pop(chunk, None)  # moves the chunk to the end of the order
        self._sent.update(dict.fromkeys(chosen, sent))
        while len(self._sent) > _MOST:
            self._shrink(now=sent.at)

    def _shrink(self, *, now: float) -> None:
        oldest = next(iter(self._sent.values()))
        if now - oldest.at > _OLD_S:
            for chunk in list(islice(self._sent, _MOST // 4)):
                del self._sent[chunk]
            return
        self._mask = self._mask * 2 + 1
        self._sent = {chunk: sent for chunk, sent in self._sent.items() if not chunk & self._mask}

    def check_integrity(self) -> None:
        assert len(self._sent) <= _MOST
        assert not any(chunk & self._mask for chunk in self._sent)
