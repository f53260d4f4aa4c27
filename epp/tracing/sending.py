"""Sends spans in batches from a separate thread, so that no pick and no shutdown waits for a collector.

`put` appends to a bounded queue. While the queue is full, new spans are dropped and counted. The thread makes
the spans from the queued items. This module knows neither picks nor OpenTelemetry: `tracer` fills the queue,
and `start` says how a batch is sent.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of OpenTelemetry's batch processor."""

    max_queued: int = 2048
    max_batch: int = 512
    delay_s: float = 5.0


class Sender(Generic[T]):
    """`start`, `put` and `stop` must be called from one thread. Any thread may read the counts."""

    def __init__(
        self, send: Callable[[Sequence[T]], bool], close: Callable[[], None], *, bounds: Bounds
    ) -> None:
        """send: delivers a batch, and says whether it arrived; may block. close: ends the wait of `send`."""
        self._send = send
        self._close = close
        self._bounds = bounds
        self._queue: deque[T] = deque()
        self._wake = threading.Event()
        self.finished = threading.Event()
        """Set after `stop`, when the queued spans have been sent. Others only read it."""
        self._stopping = False
        self._sent = self._failed = self._dropped = 0
        # A collector that hangs cannot keep the process from ending, since the thread is a daemon.
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of spans, by what became of them."""
        return {"sent": self._sent, "failed": self._failed, "dropped": self._dropped}

    def start(self) -> None:
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue a span without waiting. If the queue is full, the span is dropped and counted."""
        if len(self._queue) >= self._bounds.max_queued:
            self._dropped += 1
            return
        self._queue.append(item)
        if len(self._queue) == self._bounds.max_batch:
            self._wake.set()

    def stop(self) -> None:
        """Send the queued spans, then end. Does not wait: check `finished`."""
        self._stopping = True
        self._wake.set()

    def give_up(self) -> None:
        """End the current sending, as far as this is possible without waiting. The remaining spans are lost
        when the process ends.
        """
        self._queue.clear()
        self._close()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._bounds.delay_s)
            self._wake.clear()
            self._send_all()
        self._send_all()
        self.finished.set()

    def _send_all(self) -> None:
        while batch := self._next_batch():
            try:
                arrived = self._send(batch)
            except Exception:  # noqa: BLE001 - after any error, later batches may arrive
                _log.exception("a batch of %d spans cannot be sent", len(batch))
                arrived = False
            if arrived:
                self._sent += len(batch)
            else:
                self._failed += len(batch)

    def _next_batch(self) -> list[T]:
        batch: list[T] = []
        while len(batch) < self._bounds.max_batch:
            try:
                batch.append(self._queue.popleft())
            except IndexError:  # the queue is empty, or was cleared at this moment
                break
        return batch
