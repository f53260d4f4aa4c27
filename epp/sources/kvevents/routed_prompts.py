"""Queues prompts for exact mode: the queue listens to the picker's events, and the thread of exact mode
empties the queue.

The queue checks a byte budget when a request begins, and appends one item when its answer begins. Each
attribute is written by only one side, so no lock is needed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from epp.base.types import ChunkHash, EndpointName, InferenceRequest
from epp.config.policy import Chunks
from epp.picker.events import Answered, Began, Ended, Pick, PickerEvent, Restarted


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """A prompt that a server has begun to answer."""

    server: EndpointName
    adapter: str
    inference: InferenceRequest
    chain: Sequence[ChunkHash]
    schedule: Chunks
    """The schedule by which the chain was cut."""


class RoutedPrompts:
    """A queue with bounds on number and bytes. A prompt beyond a bound is dropped and counted.

    The picker's thread calls `on_event`, the other thread calls `take`.
    """

    def __init__(self, *, max_prompts: int = 1000, max_bytes: int = 64 * 2**20) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._unanswered: dict[Pick, InferenceRequest] = {}
        """Prompts whose answers have not begun. Only the picker's thread uses it."""
        self._queue: deque[RoutedPrompt] = deque()
        self.restarted: deque[EndpointName] = deque(maxlen=max_prompts)
        """Servers whose process has ended, by their counters. The other thread empties this."""
        self._kept_bytes = 0
        """Bytes ever kept, minus those dropped. Only the picker's thread writes it."""
        self._taken_bytes = 0
        """Bytes ever taken. Only the other thread writes it."""
        self.dropped = 0

    def on_event(self, event: PickerEvent) -> None:
        match event:
            case Began(pick=pick, question=question) if pick.chain:
                size = len(question.inference.prompt)
                if self.held_bytes + size > self._max_bytes:
                    self.dropped += 1
                else:
                    self._kept_bytes += size
                    self._unanswered[pick] = question.inference
            case Answered(pick=pick):
                status = pick.decision.status
                if status is not None and status < 300:  # after a refusal the server has computed nothing
                    self._let_go(pick, answered=True)
            case Ended(pick=pick):
                self._let_go(pick, answered=False)
            case Restarted(server=server):
                self.restarted.append(server.endpoint.name)

    def _let_go(self, pick: Pick, *, answered: bool) -> None:
        """Queue a prompt whose answer begins. Drop a prompt whose answer will not begin."""
        inference = self._unanswered.pop(pick, None)
        if inference is None:
            return
        if answered and len(self._queue) < self._max_prompts:
            routed = RoutedPrompt(
                server=pick.state.endpoint.name,
                adapter=pick.decision.adapter,
                inference=inference,
                chain=pick.chain,
                schedule=pick.guess.table.schedule,
            )
            self._queue.append(routed)
            return
        self._kept_bytes -= len(inference.prompt)
        self.dropped += answered

    def take(self) -> RoutedPrompt | None:
        """Return the oldest prompt. None: the queue is empty."""
        if not self._queue:
            return None
        routed = self._queue.popleft()
        self._taken_bytes += len(routed.inference.prompt)
        return routed

    @property
    def held_bytes(self) -> int:
        return self._kept_bytes - self._taken_bytes
