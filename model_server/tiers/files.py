"""Writes and reads the files of a store's folder. Each file is written whole and readable only by its owner.
A bounded number of handles is open for reading.

A store has more files than a process may have open. So `OpenFiles` keeps only the files open that were read
last. A file that was closed is opened again when it is read. If it was replaced or removed meanwhile, the
read raises DamagedSegmentError. A reader holds the handle, which is closed when no reader has it any more.

A `Disk` reads with one `pread`, and counts the reads. Callers: segments, the store (its manifest), and the
benchmarks, which choose the disk. All threads may call.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_server.tiers.errors import DamagedSegmentError

UNFINISHED = ".unfinished"
_MOST_OPEN = 256
_LEAST_OPEN = 4
_ONLY_OWNER = 0o600
"""The stored data reveals prompts, so no other user may read the folder."""


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write or replace the file in one step, so that a file under this name is always complete, also after a
    crash of the machine. Raise the disk's OSError. If only the folder could not be synced, the file exists in
    spite of the error.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(unfinished, flags, _ONLY_OWNER), "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        # A full disk needs this room now. If the removal fails, the next opening of the store repeats it.
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names that were last added to the folder or removed from it."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Handle:
    """A file that is open for reading as long as this object exists."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raise DamagedSegmentError if the path is a link. If the path is a pipe, the call
        does not wait for a writer.
        """
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedSegmentError(f"{path} is a link, not a regular file") from error
            raise

    def __del__(self) -> None:
        if (number := getattr(self, "number", -1)) >= 0:
            os.close(number)


class OpenFiles:
    def __init__(self, *, limit: int | None = None) -> None:
        """If `limit` is None, up to a quarter of the files that this process may open stay open, within fixed
        bounds.
        """
        self.limit = limit or max(_LEAST_OPEN, min(_MOST_OPEN, _allowed() // 4))
        self._lock = threading.Lock()
        self._recent: OrderedDict[int, weakref.ref[ReadFile]] = OrderedDict()
        """The open files by identity, in the order of their last reads, the oldest first. Some of them are no
        longer used.
        """

    def read(self, file: ReadFile) -> None:
        """Note that the file is open, and was read last."""
        with self._lock:
            self._recent[id(file)] = weakref.ref(file)
            self._recent.move_to_end(id(file))
            closed = self._recent.popitem(last=False)[1]() if len(self._recent) > self.limit else None
        if closed is not None:
            closed.let_go()

    def check_integrity(self) -> None:
        with self._lock:
            assert len(self._recent) <= self.limit


class ReadFile:
    """One file, which is open or can be opened again."""

    def __init__(self, path: Path, files: OpenFiles) -> None:
        """Open the file. Raise DamagedSegmentError if the path does not lead to a regular file, and OSError
        if the disk failed.
        """
        self.path = path
        self._files = files
        self._handle: Handle | None = Handle(path)
        status = os.fstat(self._handle.number)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedSegmentError(f"{path} is not a regular file")
        self._identity = status.st_dev, status.st_ino
        self.size_bytes = status.st_size
        self.written_ns = status.st_mtime_ns
        files.read(self)

    def handle(self) -> Handle:
        """Return a handle to read from. Raise DamagedSegmentError if the path leads to another file now, or
        to none.
        """
        handle = self._handle
        if handle is None:
            try:
                handle = Handle(self.path)
            except FileNotFoundError as error:
                raise DamagedSegmentError(f"{self.path} was removed") from error
            status = os.fstat(handle.number)
            if (status.st_dev, status.st_ino) != self._identity:
                raise DamagedSegmentError(f"{self.path} was replaced")
            self._handle = handle
        self._files.read(self)
        return handle

    def let_go(self) -> None:
        self._handle = None

    def is_there(self) -> bool:
        """Return whether the path still leads to the same file."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity


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


def _allowed() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4 * _MOST_OPEN if soft == resource.RLIM_INFINITY else soft
