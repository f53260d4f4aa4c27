"""Reads the disk tier, and counts the reads. Measurements may use a disk that is slowed down to a given rate.

A read is one `pread`. Callers: segments; the benchmarks, which choose the disk.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from model_server.tiers.files import OpenFiles


@dataclass(slots=True)
class ReadCounts:
    reads: int = 0
    bytes: int = 0


class Disk:
    """The real disk, with the system's page cache in front of it."""

    def __init__(self, *, max_open_files: int | None = None) -> None:
        """If `max_open_files` is None, the process's own limit decides how many files stay open."""
        self.counts = ReadCounts()
        self.files = OpenFiles(limit=max_open_files)
        self._lock = threading.Lock()

    def read(self, file: int, *, offset: int, num_bytes: int) -> bytes:
        """Read bytes. Return fewer bytes than asked for if the file ends. Raise the system's OSError."""
        with self._lock:
            self.counts.reads += 1
            self.counts.bytes += num_bytes
        return os.pread(file, num_bytes, offset)


class RateLimitedDisk(Disk):
    """A queue that serves `bytes_per_s`, after `per_read_s` for each read. Reads take at least that long."""

    def __init__(self, *, bytes_per_s: float, per_read_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self._per_read_s = per_read_s
        self._queue = threading.Lock()
        self._free_at = 0.0

    def read(self, file: int, *, offset: int, num_bytes: int) -> bytes:
        content = super().read(file, offset=offset, num_bytes=num_bytes)
        with self._queue:
            self._free_at = (
                max(self._free_at, time.monotonic()) + self._per_read_s + num_bytes / self.bytes_per_s
            )
            wait_s = self._free_at - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
        return content
