"""Reads the disk tier, and counts the reads.

A read is one `pread`. Callers: segments; the benchmarks, which choose the disk.
"""

from __future__ import annotations

import os
import threading
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
