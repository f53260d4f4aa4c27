"""Writes the two files of a recording: the current file and the previous one. Together they stay within the
bound.

A new file is begun when the process starts, and whenever the current file has reached half of the bound. The
previous file is kept as `NAME.1`, and an older one is lost. Each file begins with everything that a reader
needs. Used by `command`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from epp.observe.recording.lines import Opening, RecordedRequest, Servers, encode


class RecordingFile:
    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._most_bytes = max_bytes // 2
        self._descriptor = -1
        self._size_bytes = 0
        self._opening: Opening | None = None
        self._servers: Servers | None = None

    def write(self, lines: Sequence[RecordedRequest], *, opening: Opening, servers: Servers) -> None:
        """Append lines. OSError: the lines are lost, and the next call begins a new file."""
        try:
            for line in lines:
                self._append(encode(line), opening=opening, servers=servers)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, text: bytes, *, opening: Opening, servers: Servers) -> None:
        if self._descriptor < 0 or self._size_bytes + len(text) > self._most_bytes:
            self._begin()
        head = b""
        if opening != self._opening:
            head += encode(opening)
        if servers != self._servers:
            head += encode(servers)
        self._write_all(head + text)
        self._opening, self._servers = opening, servers

    def _begin(self) -> None:
        self.close()
        self._opening = self._servers = None
        self._size_bytes = 0
        if self._path.exists():
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)

    def _write_all(self, text: bytes) -> None:
        self._size_bytes += len(text)
        view = memoryview(text)
        while view:
            view = view[os.write(self._descriptor, view) :]
