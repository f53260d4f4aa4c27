"""Finds the chunks that nearly every request of a segment reads, so that they can be fetched while the layer
before is computed.

Which chunks a layer needs is known only when its queries are computed. So its reads would wait for the
computation, and the computation of the next layer would wait for these reads. But requests with the same
prefix choose similar tokens, and reordering puts these tokens into the same chunks.

Invariants (`check_integrity`): a chunk is counted at most once for each request. This module does no I/O.
Caller: the tiered reader, in its own thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

_NEARLY_ALL = 0.9
_FEWEST_REQUESTS = 2


@dataclass(slots=True)
class _Reads:
    """The reads of one layer of a segment."""

    requests: int = 0
    of_chunk: Counter[int] = field(default_factory=Counter)


class Foresight(Generic[S]):
    """Counts the chunks that requests read, and expects the chunks that nearly all requests read. `S` is the
    type of a segment.
    """

    def __init__(self) -> None:
        self._reads: defaultdict[S, defaultdict[int, _Reads]] = defaultdict(lambda: defaultdict(_Reads))

    def record(self, segment: S, layer: int, chunks: Collection[int]) -> None:
        """Note that a request has read these chunks of the layer, each once, and no other chunk of the
        layer.
        """
        reads = self._reads[segment][layer]
        reads.requests += 1
        reads.of_chunk.update(chunks)

    def expected(self, segment: S, layer: int) -> list[int]:
        """Return the expected chunks in ascending order. No chunk is expected before two requests have read
        the layer.
        """
        reads = self._reads[segment][layer] if segment in self._reads else _Reads()
        if reads.requests < _FEWEST_REQUESTS:
            return []
        enough = _NEARLY_ALL * reads.requests
        return sorted(chunk for chunk, count in reads.of_chunk.items() if count >= enough)

    def forget(self, segment: S) -> None:
        self._reads.pop(segment, None)

    def check_integrity(self, known: Collection[S]) -> None:
        """Check the invariants. `known` are the existing segments."""
        assert self._reads.keys() <= set(known)
        for layers in self._reads.values():
            for reads in layers.values():
                assert all(0 < count <= reads.requests for count in reads.of_chunk.values())
