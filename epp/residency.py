"""What exact mode hears of the picker, and what it tells it back. The two meet nowhere else.

On the path of a request: one look at a byte budget when it is picked, one append when its answer begins. Another thread takes
the prompts from the queue; every attribute here is written by one side only, so that no lock is needed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from epp.prefix_index.hashing import ChunkSchedule
from epp.types import ChunkHash, EndpointName, InferenceRequest

UNDER_WAY_S: Final = 60.0
"""A prompt that a server got so recently may be stored any moment: that it is not there proves nothing."""


class Tier(enum.IntEnum):
    """Where a server has a block, the fastest first."""

    GPU = 0
    CPU = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A prompt that a server has begun to answer."""

    server: EndpointName
    process: int
    """Counts the processes seen under the server's name."""
    model: str
    """The server's base model; empty where its source does not say."""
    adapter: str
    inference: InferenceRequest
    chain: Sequence[ChunkHash]
    schedule: ChunkSchedule
    """By which the chain was cut."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A server came to hold a chain, or lost the end of it, by its own account.

    Chunks before `held` are there. If there are more in the chain, the next one is not, unless it was used after `at`: what is
    under way is stored soon.
    """

    server: EndpointName
    chain: Sequence[ChunkHash]
    held: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How much of one chain each server holds: a prompt was routed, and its blocks were looked up everywhere."""

    chain: Sequence[ChunkHash]
    held: Mapping[EndpointName, int]
    """Chunks, where there are any."""
    sure: AbstractSet[EndpointName]
    """Servers that hold no more than that, but for what they got in the last `UNDER_WAY_S`."""
    from_chunk: int
    """Shorter prefixes hold no whole block: nothing is known of them."""
    to_chunk: int
    """Of longer ones no server ever stored anything, so their names may be wrong: nothing is taken away from there."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is known of one server as a whole."""

    server: EndpointName
    live: bool
    """Its events are followed, and name blocks as we do."""
    known_bytes: int = 0
    """Prompt text that it holds by its own account."""
    moved: Mapping[ChunkHash, Tier] = field(default_factory=dict)
    """Chunks that came to another tier since the last account; those that nothing is said of, or is known of any more, are in
    the first."""


Finding = Held | Checked | Account


class RoutedQueue:
    """Prompts on their way from the picker to exact mode, bounded in number and bytes; what is over a bound is dropped and counted.

    The picker calls `keep` with each pick, then `put` or `let_go` once; the other thread calls `take`. While nobody takes any, the
    picker's thread has it closed.
    """

    def __init__(self, *, max_prompts: int, max_bytes: int) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._queue: deque[Routed] = deque()
        self._kept_bytes = 0
        """Ever kept, less what was let go: written by the picker's thread alone."""
        self._taken_bytes = 0
        """Ever taken: written by the other."""
        self._closed = False
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def keep(self, inference: InferenceRequest) -> InferenceRequest | None:
        """The request, if its prompt may be held until the answer begins."""
        size = inference.held_bytes
        if self._closed:
            return None
        if self._kept_bytes - self._taken_bytes + size > self._max_bytes:
            self.dropped += 1
            return None
        self._kept_bytes += size
        return inference

    def put(self, routed: Routed) -> None:
        """The answer begins."""
        if self._closed:
            self._kept_bytes -= routed.inference.held_bytes
        elif len(self._queue) >= self._max_prompts:
            self.dropped += 1
            self._kept_bytes -= routed.inference.held_bytes
        else:
            self._queue.append(routed)

    def let_go(self, inference: InferenceRequest) -> None:
        """No answer comes of it."""
        self._kept_bytes -= inference.held_bytes

    def take(self) -> Routed | None:
        """The oldest, if there is any."""
        try:
            routed = self._queue.popleft()
        except IndexError:
            return None
        self._taken_bytes += routed.inference.held_bytes
        return routed

    def close(self) -> None:
        """Nobody takes any more: what waits is let go, and nothing more is kept."""
        self._closed = True
        while self.take() is not None:
            pass

    def open(self) -> None:
        """Somebody takes again."""
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return self._kept_bytes - self._taken_bytes
