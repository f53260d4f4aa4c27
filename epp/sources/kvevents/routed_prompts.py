"""Queues prompts for exact mode: the queue listens to the picker's events, and the thread of exact mode
empties the queue.

The queue checks a byte budget when a request begins, and appends one item when its answer begins. Each
attribute is written by only one side, so no lock is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from epp.base.types import ChunkHash, EndpointName, InferenceRequest
from epp.picker.events import Answered, Began, Ended, Pick, PickerEvent
from epp.picker.prefix_index.table import ChunkSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """A prompt that a server has begun to answer."""

    server: EndpointName
    process: int
    """Number of processes seen under the server's name."""
    adapter: str
    inference: InferenceRequest
    chain: Sequence[ChunkHash]
    schedule: ChunkSchedule
    """The schedule by which the chain was cut."""


class RoutedPrompts:
    """A queue with bounds on number and bytes. A prompt beyond a bound is dropped and counted.

    The picker's thread calls `on_event`, the other thread calls `take`. While no thread takes prompts, the
    picker's thread closes the queue.
    """

    def __init__(self, *, max_prompts: int, max_bytes: int) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._unanswered: dict[Pick, InferenceRequest] = {}
        """Prompts whose answers have not begun. Only the picker's thread uses it."""
        self._queue: deque[RoutedPrompt] = deque()
        self._kept_bytes = 0
        """Bytes ever kept, minus those dropped. Only the picker's thread writes it."""
        self._taken_bytes = 0
        """Bytes ever taken. Only the other thread writes it."""
        self._closed = False
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def on_event(self, event: PickerEvent) -> None:
        kind = type(event)
        if kind is Began:
            self._keep(event.request, event.question.inference)  # type: ignore[union-attr]  # mypy does not narrow by type()
        elif kind is Answered:
            self._put(event.request)  # type: ignore[union-attr]
        elif kind is Ended:
            self._let_go(event.request)  # type: ignore[union-attr]

    def _keep(self, request: Pick, inference: InferenceRequest) -> None:
        """Keep a prompt until its answer begins, if the bounds allow it."""
        if self._closed or not request.chain:
            return
        size = inference.held_bytes
        if self.held_bytes + size > self._max_bytes:
            self.dropped += 1
            return
        self._kept_bytes += size
        self._unanswered[request] = inference

    def _put(self, request: Pick) -> None:
        """Called when the answer begins: queue its prompt. A refused request is kept until it ends, since its
        server computed nothing.
        """
        status = request.decision.status
        if status is None or status >= 400:
            return
        inference = self._unanswered.pop(request, None)
        if inference is None:
            return
        if self._closed:
            self._kept_bytes -= inference.held_bytes
        elif len(self._queue) >= self._max_prompts:
            self.dropped += 1
            self._kept_bytes -= inference.held_bytes
        else:
            self._queue.append(_routed(request, inference))

    def _let_go(self, request: Pick) -> None:
        """Drop a prompt whose answer will not begin."""
        inference = self._unanswered.pop(request, None)
        if inference is not None:
            self._kept_bytes -= inference.held_bytes

    def take(self) -> RoutedPrompt | None:
        """Return the oldest prompt. None: the queue is empty."""
        try:
            routed = self._queue.popleft()
        except IndexError:
            return None
        self._taken_bytes += routed.inference.held_bytes
        return routed

    def close(self) -> None:
        """Drop all queued prompts, and keep none from now on."""
        self._closed = True
        while self.take() is not None:
            pass

    def open(self) -> None:
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return self._kept_bytes - self._taken_bytes


def _routed(request: Pick, inference: InferenceRequest) -> RoutedPrompt:
    return RoutedPrompt(
        server=request.state.endpoint.name,
        process=request.guess.process,
        adapter=request.decision.adapter,
        inference=inference,
        chain=request.chain,
        schedule=request.guess.table.schedule,
    )
