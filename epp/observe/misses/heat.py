"""The most frequent beginnings of prompts, with the hits of the requests that share them. Bounded. Old
requests count less and less. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from epp.base.types import ChunkHash, EndpointName

_CHUNKS: Final = 8
"""Requests that share this many chunks are one group. Shorter prompts are grouped by all of their chunks."""
_MOST: Final = 512
_KEPT: Final = 384
"""If there are too many groups, this many of the hottest stay. Searching for the coldest group at each new
group would take longer than a pick."""
_HALF_EVERY_S: Final = 60.0
_MOST_SERVERS: Final = 64
_LEAST: Final = 0.5


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
            if len(self._groups) >= _MOST:
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
        for name in sorted(newest_first, key=lambda name: -self._groups[name].requests)[_KEPT:]:
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
        assert len(self._groups) <= _MOST
        assert all(len(group.sent) <= _MOST_SERVERS for group in self._groups.values())
