"""Makes the picker record the requests of a run: asks its admin address for the lines, as `epp record` does,
and writes them to a file.

The lines are written as they come, so the generator needs no installed picker. A picker that cannot be
recorded does not stop the run: the command says why there is no recording.
"""

from __future__ import annotations

import http.client
import os
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_EVERY_S: Final = 1.0
_WITHIN_S: Final = 8.0
_MOST_BYTES: Final = 256 * 2**20
"""The size of the largest file. Later lines are left out."""
_HEAD_LINES: Final = 2
"""Every answer begins with lines about the picker's policy and its servers."""


class PickerRecording:
    def __init__(self, admin: str, path: Path) -> None:
        self._url = f"{admin.rstrip('/')}/recording?reader={secrets.token_hex(8)}"
        self._path = path
        self._head = b""
        self._size_bytes = 0
        self.requests = 0
        self.left_out = 0
        """Requests for which the picker or the file had no room."""
        self.fault = ""
        """Why the recording ended before the run, or never began."""

    def fetch(self, *, last: bool = False) -> None:
        """Write the requests that ended since the last call. With `last` the picker stops recording. A
        failure is kept, and ends the recording.
        """
        if self.fault:
            return
        try:
            with urllib.request.urlopen(self._url + "&last" * last, timeout=_WITHIN_S) as answer:
                text, left_out = answer.read(), int(answer.headers.get("Left-Out", "0"))
            self._write(text, left_out)
        except urllib.error.HTTPError as error:
            reasons = {
                409: "another `epp record` is reading it",
                404: "this version of the picker cannot be recorded",
            }
            self.fault = reasons.get(error.code, f"status {error.code}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.fault = str(error)

    def _write(self, text: bytes, left_out: int) -> None:
        lines = text.splitlines(keepends=True)
        head, rows = b"".join(lines[:_HEAD_LINES]), lines[_HEAD_LINES:]
        body = b"".join(rows) if head == self._head else head + b"".join(rows)
        self._head = head
        if self._size_bytes + len(body) > _MOST_BYTES:
            self.fault = f"the file is full ({_MOST_BYTES >> 20} MiB)"
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
            file.write(body)
        self._size_bytes += len(body)
        self.requests += len(rows)
        self.left_out = left_out

    def summary(self) -> str:
        """Return the result as a line of text."""
        if not self.requests:
            return f"The picker recorded nothing: {self.fault or 'it saw no request'}"
        left_out = f", {self.left_out:,} left out" if self.left_out else ""
        fault = f"; it ended early: {self.fault}" if self.fault else ""
        return f"Recording: {self._path} ({self.requests:,} requests{left_out}{fault}); `epp replay` reads it"


@contextmanager
def recorded(admin: str, path: Path) -> Iterator[None]:
    """Record in `path` the requests that the picker routes during the block. A message at the end gives the
    result. Without an admin address nothing is recorded.
    """
    if not admin:
        yield
        return
    path.unlink(missing_ok=True)
    recording, over = PickerRecording(admin, path), threading.Event()
    recording.fetch()  # from now on the picker keeps lines

    def keep_fetching() -> None:
        while not over.wait(_EVERY_S):
            recording.fetch()

    thread = threading.Thread(target=keep_fetching, name="recording", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # The picker gets the end of an answer from Envoy, a moment after the client.
        over.wait(_EVERY_S)
        over.set()
        thread.join(_WITHIN_S)
        recording.fetch(last=True)
        print(recording.summary(), flush=True)
