"""Splits a stream of server-sent events, in whatever pieces it arrives, into each event's data.

Lines end in LF or CRLF, as all servers write them. The unfinished line and event together never have more
than `max_event_bytes`: a longer event is dropped whole, and the next event is read normally. After
`MOST_LINES` of one answer nothing more is read: each line costs half a microsecond, however short it is. This
module does not know what the data means. Called by `response`.
"""

from __future__ import annotations

from typing import Final

_BOM: Final = b"\xef\xbb\xbf"
_DATA: Final = b"data:"
MOST_LINES: Final = 200_000


class EventSplitter:
    def __init__(self, *, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        """The line that has not ended."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._too_long = False
        """The current event passed the limit, so nothing of it is kept."""
        self._lines = 0
        self.dropped = False
        """Whether an event was dropped."""

    def feed(self, piece: bytes) -> list[bytes]:
        if self._lines > MOST_LINES:
            return []
        *lines, rest = piece.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._end_line(bytes(self._line) + line, events)
            self._line.clear()
        self._line += rest
        if len(self._line) + self._data_bytes > self._max_event_bytes:
            self._drop()
            self._line[:] = b":"  # neither blank, which would end the event, nor data
        return events

    def finish(self) -> list[bytes]:
        """Return the event that the stream ended in, if any: some servers leave out the last blank line."""
        events: list[bytes] = []
        if self._line:
            self._end_line(bytes(self._line), events)
        self._end_event(events)
        return events

    def check_integrity(self) -> None:
        assert len(self._line) + self._data_bytes <= self._max_event_bytes
        assert self._data_bytes == sum(map(len, self._data)) + len(self._data)
        assert not (self._too_long and self._data)

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        self._lines += 1
        if self._lines > MOST_LINES:
            self._drop()
            return
        line = line.removesuffix(b"\r")
        if self._lines == 1:
            line = line.removeprefix(_BOM)
        if not line:
            self._end_event(events)
        elif line.startswith(_DATA) and not self._too_long:
            value = line.removeprefix(_DATA).removeprefix(b" ")
            self._data_bytes += len(value) + 1  # with the line feed before the next value
            self._data.append(value)
            if self._data_bytes > self._max_event_bytes:
                self._drop()

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
