"""Provides disks to measure on: the machine's own disk without its page cache, and a disk that is switched
between runs.

`DirectDisk` reads with O_DIRECT, so its bytes come from the block device. In a virtual machine they come from
the host, whose own cache cannot be controlled. The benchmark on large shapes calls this module.
"""

import mmap
import os

from model_server.tiers.files import Disk

_PAGE = 4096


class DirectDisk(Disk):
    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[tuple[int, int], int] = {}
        """The open files, by device and inode. No other file gets this pair while we have the file open."""
        self._buffer = mmap.mmap(-1, _PAGE)

    def read(self, file: int, *, offset: int, num_bytes: int) -> bytes:
        start = offset - offset % _PAGE
        end = -(-(offset + num_bytes) // _PAGE) * _PAGE
        with self._lock:
            self.counts.reads += 1
            self.counts.bytes += num_bytes
            if len(self._buffer) < end - start:
                self._buffer = mmap.mmap(-1, end - start)
            view = memoryview(self._buffer)[: end - start]
            got = os.preadv(self._direct(file), [view], start)
            return bytes(view[offset - start : min(got, offset - start + num_bytes)])

    def close(self) -> None:
        for number in self._opened.values():
            os.close(number)
        self._opened.clear()

    def _direct(self, file: int) -> int:
        status = os.fstat(file)
        key = status.st_dev, status.st_ino
        if key not in self._opened:
            try:
                self._opened[key] = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                raise SystemExit(
                    f"files cannot be read past the page cache here ({error}); set TMPDIR on a disk"
                ) from error
        return self._opened[key]


class SwitchedDisk(Disk):
    """Counts the bytes that are read from the disk that is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Disk()

    def read(self, file: int, *, offset: int, num_bytes: int) -> bytes:
        self.counts.reads += 1
        self.counts.bytes += num_bytes
        return self.now.read(file, offset=offset, num_bytes=num_bytes)
