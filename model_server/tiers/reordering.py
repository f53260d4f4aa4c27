"""Reorders nodes in the background while the engine is idle, and for a bounded share of the time while the
engine computes. One thread reorders one node after the other. A node has at most `writer.NODE_TOKENS` tokens,
so a request that comes meanwhile waits for the interpreter during one node at most. After any failure the
thread pauses for a while. Caller: the served tiers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from model_server.tiers.errors import StoreError
from model_server.tiers.health import Health

_LOOK_AGAIN_S = 0.25

_log = logging.getLogger(__name__)


class BackgroundReordering:
    def __init__(
        self,
        reorder_next: Callable[[], bool],
        *,
        is_idle: Callable[[], bool],
        busy_share: float,
        clock: Callable[[], float],
        stop_within: Callable[[float], bool] | None = None,
    ) -> None:
        """`reorder_next` reorders one node, and returns False if no node is due. `busy_share` is the share of
        the time for reordering while the engine computes. `stop_within` waits the given number of seconds and
        says whether the thread has to stop.
        """
        if not 0 < busy_share <= 1:
            raise ValueError(f"the share of the time must be over 0 and at most 1, not {busy_share}")
        self.reordered_nodes = 0
        self.failures = 0
        self._reorder_next = reorder_next
        self._is_idle = is_idle
        self._pause_for_work = 1 / busy_share - 1
        self._clock = clock
        self._health = Health()
        self._stopping = threading.Event()
        self._stop_within = stop_within or self._stopping.wait
        self._thread = threading.Thread(target=self.run, name="kv-store-reordering", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Wait until the current node is done. Return False if this takes longer than the given time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run(self) -> None:
        """Run until the thread is asked to stop."""
        not_before, wait_s = self._clock(), 0.0
        while not self._stop_within(wait_s):
            wait_s = _LOOK_AGAIN_S
            started = self._clock()
            if not self._health.may_try(now=started) or (started < not_before and not self._is_idle()):
                continue
            if self._try():
                ended = self._clock()
                not_before, wait_s = ended + (ended - started) * self._pause_for_work, 0.0

    def _try(self) -> bool:
        try:
            done = self._reorder_next()
        except (StoreError, OSError) as error:
            _log.warning(
                "a node could not be reordered: %s; the next attempt is in %.0f s", error, self._failed()
            )
            return False
        except Exception:  # noqa: BLE001 # the error is logged and counted, and the thread has to go on
            _log.exception("a node could not be reordered; the next attempt is in %.0f s", self._failed())
            return False
        if done:
            self.reordered_nodes += 1
            self._health.worked()
        return done

    def _failed(self) -> float:
        self.failures += 1
        return self._health.failed(now=self._clock())
