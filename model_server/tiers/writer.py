"""Writes prefixes to the store in one thread. No request waits for this thread.

The waiting prefixes are bounded in bytes. A prefix that does not fit is counted and not stored. After a
failure of the disk, nothing is written for a while (`health`), and prefixes that come meanwhile are not
stored either. Requests are not affected. Any other failure with one prefix is logged, and the thread goes on.
The thread is a daemon thread, since a disk that hangs must not keep the process from ending. The store
survives an incomplete write.

Invariants (`check_integrity`): the waiting prefixes have `waiting_bytes` bytes together, which is at most
`capacity_bytes`.
Callers: the served tiers (offer, from the step thread), the server (drain).
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_server.core.hashing import BlockHash
from model_server.tiers.errors import StoreError
from model_server.tiers.health import Health
from model_server.tiers.segment import LayerRecords
from model_server.tiers.store import PrefixStore

NODE_TOKENS = 4096
"""Longer prefixes become several nodes, so that one write or reordering stays bounded."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PendingBlocks:
    """The blocks of a prefix from `first_block` on, which wait to be stored."""

    hashes: Sequence[BlockHash]
    first_block: int
    size_bytes: int
    records: Callable[[int, int], Sequence[LayerRecords]]
    """Returns the records of the blocks [start, end) of the prefix. It is called in the writer's thread."""

    @property
    def own(self) -> Sequence[BlockHash]:
        return self.hashes[self.first_block :]


@dataclass(slots=True)
class WriterCounts:
    stored_blocks: int = 0
    written_bytes: int = 0
    failures: int = 0
    dropped_blocks: int = 0


class BackgroundWriter:
    def __init__(self, store: PrefixStore, *, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self.counts = WriterCounts()
        self.waiting_bytes = 0
        self._store = store
        self._capacity_bytes = capacity_bytes
        self.clock = clock
        self._health = Health()
        self._waiting: deque[PendingBlocks] = deque()
        self._on_the_way: Counter[BlockHash] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-store-writer", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Tell whether the disk may be used. It may not for a while after a failed write."""
        return self._health.may_try(now=self.clock())

    def is_on_the_way(self, block: BlockHash) -> bool:
        return block in self._on_the_way

    def has_room(self, num_bytes: int) -> bool:
        return not self._closed and self.usable and self.waiting_bytes + num_bytes <= self._capacity_bytes

    def offer(self, pending: PendingBlocks) -> bool:
        """Store these blocks later. Return False if they are not stored, because there is no room or no
        working disk.
        """
        with self._changed:
            if not self.has_room(pending.size_bytes):
                self.counts.dropped_blocks += len(pending.own)
                return False
            self._waiting.append(pending)
            self._on_the_way.update(pending.own)
            self.waiting_bytes += pending.size_bytes
            self._changed.notify_all()
            return True

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until no blocks are waiting or being written. Return False if this takes longer than the given
        time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting_bytes, timeout_s)

    def close(self, *, timeout_s: float) -> bool:
        """Drop the waiting blocks. Blocks that are being written are still stored, if the process lives long
        enough. Return False if blocks are still being written.
        """
        with self._changed:
            self._closed = True
            while self._waiting:
                self._ended(self._waiting.popleft())
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check_integrity(self) -> None:
        with self._changed:
            waiting = sum(pending.size_bytes for pending in self._waiting)
            assert waiting <= self.waiting_bytes <= self._capacity_bytes
            assert all(count > 0 for count in self._on_the_way.values())
            assert {block for pending in self._waiting for block in pending.own} <= self._on_the_way.keys()
            assert bool(self._on_the_way) == bool(self.waiting_bytes)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                pending = self._waiting.popleft()
            try:
                self._write(pending)
            except Exception:  # noqa: BLE001 # the error is logged and counted, and the thread has to go on
                self._health.failed(now=self.clock())
                self.counts.failures += 1
                _log.exception("a prefix of %d blocks could not be stored", len(pending.hashes))
            self._count_dropped(pending)
            with self._changed:
                self._ended(pending)
                self._changed.notify_all()

    def _ended(self, pending: PendingBlocks) -> None:
        self.waiting_bytes -= pending.size_bytes
        self._on_the_way -= Counter(pending.own)

    def _count_dropped(self, pending: PendingBlocks) -> None:
        """Count blocks that will not be stored."""
        held = max(pending.first_block, self._store.num_held(pending.hashes))
        self.counts.dropped_blocks += len(pending.hashes) - held

    def _write(self, pending: PendingBlocks) -> None:
        if not self.usable:
            return
        try:
            self._put(pending)
            self._health.worked()
        except StoreError as error:
            _log.warning("a prefix of %d blocks could not be stored: %s", len(pending.hashes), error)
        except OSError as error:
            self.counts.failures += 1
            pause_s = self._health.failed(now=self.clock())
            _log.error(
                "the KV store cannot be written: %s; nothing is stored for %.0f s; requests are not affected",
                error,
                pause_s,
            )

    def _put(self, pending: PendingBlocks) -> None:
        block_tokens = self._store.layout.block_tokens
        size = max(1, NODE_TOKENS // block_tokens)
        for start in range(pending.first_block, len(pending.hashes), size):
            end = min(start + size, len(pending.hashes))
            records = pending.records(start, end)
            new = self._store.put(pending.hashes[:end], records, first_block=start)
            if new:
                self.counts.stored_blocks += new
                self.counts.written_bytes += self._store.layout.data_bytes(new * block_tokens)
