"""What misses remember of prompts, in bounded memory. `Seen` has the servers to which chunks were sent.
`Heat` has the most frequent beginnings of prompts, with the hits of their requests. Pure.

`Seen` keeps a sample of all chunks, chosen by their hashes. While there is room, every chunk is kept. When
the memory is full, the oldest quarter is removed if it is old enough. Otherwise half of all chunks is removed
by their hashes, and chunks with such hashes are never kept again. So every occurrence of a chunk is in the
sample or none is, and shares stay correct (SHARDS, Waldspurger et al. 2015). In `Heat` old requests count
less and less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index._chain import sampled

_MOST: Final = 32_768
_OLD_S: Final = 3600.0
_CHUNKS: Final = 8
"""Requests that share this many chunks are one group. Shorter prompts are grouped by all of their chunks."""
_MOST_GROUPS: Final = 512
_KEPT_GROUPS: Final = 384
"""If there are too many groups, this many of the hottest stay. Searching for the coldest group at each new
group would take longer than a pick."""
_HALF_EVERY_S: Final = 60.0
_MOST_SERVERS: Final = 64
_LEAST: Final = 0.5


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
        return sampled(chunks, self._mask) if self._mask else chunks

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


# -- hot prefixes --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HotPrefix:
    chain: Sequence[ChunkHash]
    requests: float = 0.0
    prompt_tokens: float = 0.0
    matched_tokens: float = 0.0
    sent: dict[EndpointName, float] = field(default_factory=dict)


class Heat:
    def __init__(self) -> None:
        self._groups: dict[ChunkHash, HotPrefix] = {}
        self._halved_at = 0.0

    def note(
        self,
        chain: Sequence[ChunkHash],
        server: EndpointName,
        *,
        prompt_tokens: int,
        matched_tokens: int,
        now: float,
    ) -> None:
        if not chain:
            return
        if now - self._halved_at >= _HALF_EVERY_S:
            self._halve(now)
        head = chain[:_CHUNKS]
        group = self._groups.get(head[-1])
        if group is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._drop_coldest()
            group = self._groups[head[-1]] = HotPrefix(head)
        group.requests += 1
        group.prompt_tokens += prompt_tokens
        group.matched_tokens += matched_tokens
        if server in group.sent or len(group.sent) < _MOST_SERVERS:
            group.sent[server] = group.sent.get(server, 0.0) + 1

    def hottest(self, count: int) -> list[HotPrefix]:
        return sorted(self._groups.values(), key=lambda group: -group.requests)[:count]

    def _drop_coldest(self) -> None:
        """Remove the coldest groups. Of equally cold groups the newer ones stay."""
        newest_first = reversed(self._groups)
        for name in sorted(newest_first, key=lambda name: -self._groups[name].requests)[_KEPT_GROUPS:]:
            del self._groups[name]

    def _halve(self, now: float) -> None:
        self._halved_at = now
        for name, group in list(self._groups.items()):
            group.requests /= 2
            group.prompt_tokens /= 2
            group.matched_tokens /= 2
            group.sent = {server: sent / 2 for server, sent in group.sent.items() if sent > _LEAST}
            if group.requests < _LEAST:
                del self._groups[name]

    def check_integrity(self) -> None:
        assert len(self._groups) <= _MOST_GROUPS
        assert all(len(group.sent) <= _MOST_SERVERS for group in self._groups.values())
