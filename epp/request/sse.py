"""Splits a stream of server-sent events, in whatever pieces it arrives, into each event's data.

Owns the unfinished line and event, never more than `max_event_bytes` of either: a longer event is dropped
whole, and the next event is read normally. After `MOST_LINES` of one answer nothing more is read: each line
costs half a microsecond, however short it is. Lines end in LF, CRLF or CR. This module does not know what
the data means. Called by `response`.
"""

from __future__ import annotations

from typing import Final

_BOM: Final = b"\xef\xbb\xbf"
MOST_LINES: Final = 200_000


class EventSplitter:
    def __init__(self, *, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._too_long = False
        """The current event passed the limit, so nothing of it is kept."""
        self._after_cr = False
        """Whether the last piece ended in CR. An LF at the start of the next piece then
        belongs to this CR."""
        self._at_start = True
        self._lines_left = MOST_LINES
        self.dropped = False
        """Whether an event was dropped."""

    def feed(self, piece: bytes) -> list[bytes]:
        if self._lines_left < 0:
            return []
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        events: list[bytes] = []
        for line in piece.splitlines(keepends=True):
            ended = line.endswith((b"\n", b"\r"))
            self._append(line.rstrip(b"\r\n") if ended else line)
            if ended:
                self._end_line(events)
        self._after_cr = self._after_cr or piece.endswith(b"\r")
        return events

    def finish(self) -> list[bytes]:
        """Return the event that the stream ended in, if any: some servers leave out the last blank line."""
        events: list[bytes] = []
        if self._line:
            self._end_line(events)
        self._end_event(events)
        return events

    def check_integrity(self) -> None:
        assert len(self._line) <= self._max_event_bytes
        assert self._data_bytes == sum(map(len, self._data)) + len(self._data)
        assert self._data_bytes <= self._max_event_bytes
        assert not (self._too_long and self._data)

    def _append(self, text: bytes) -> None:
        if len(self._line) + len(text) > self._max_event_bytes:
            self._drop()
            # The colon makes the line neither blank, which would end the event here, nor a data line.
            self._line[:] = b":"
        elif not (self._too_long and self._line):
            self._line += text

    def _end_line(self, events: list[bytes]) -> None:
        self._lines_left -= 1
        line = bytes(self._line)
        self._line.clear()
        if self._lines_left < 0:
            self._drop()
            return
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            self._end_event(events)
            return
        name, _, value = line.partition(b":")
        if name != b"data" or self._too_long:
            return
        value = value.removeprefix(b" ")
        size = len(value) + 1  # with the line feed before the next value
        if self._data_bytes + size > self._max_event_bytes:
            self._drop()
        else:
            self._data.append(value)
            self._data_bytes += size

    def _end_event(self, events: list[bytes]) -> None:
        if self._data:
            events.append(b"\n".join(self._data))
        self._data.clear()
        self._data_bytes = 0
        self._too_long = False

    def _drop(self) -> None:
        self._too_long = self.dropped = True
        self._data.clear()
        self._data_bytes = 0
