"""Writes structured logs to standard error: one line for each event, as JSON or text, with the message and
the fields of `extra`. Nothing waits for the reader of the log.

Of what clients write, the picker logs request ids and names of models, and never a prompt. Control characters
are escaped, so no value can start a line of its own. Values are cut to a bounded length.

Each line is formatted where it is logged, put into a bounded queue, and written by a separate thread. When
the reader of standard error stalls, the queue fills, and further lines are dropped and counted. The next line
has their number in `lines_dropped`. If one place in the code logs very many lines, the rest is left out for a
while and counted, because clients can cause some of these lines. Each process calls `setup_logging` once.
"""

import contextlib
import json
import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Final

from epp.config.settings import Log

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MOST_VALUE_CHARS: Final = 2_000
_MOST_TRACEBACK_CHARS: Final = 16_000
"""The end of a traceback is kept, since it says what went wrong."""
_MOST_WAITING: Final = 2_000
_WINDOW_S: Final = 10.0
_LINES_A_WINDOW: Final = 100
"""Most lines from one place in the code. Further lines in the window are left out."""
_FLUSH_S: Final = 1.0
"""The end of the process waits no longer than this for a reader."""


class LineFormatter(logging.Formatter):
    """Time, level, logger, message, then the call's `extra` fields, then the exception: as one JSON object a
    line, or as text for people at a terminal.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        time_s = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time_s.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
        }
        names = [name for name in vars(record) if name not in _STANDARD and name not in line]
        names.sort(key=lambda name: name != "request_id")  # people search for it, so it comes first
        extra = {name: _bounded(vars(record)[name]) for name in names}
        exception = ""
        if record.exc_info:
            exception = self.formatException(record.exc_info)[-_MOST_TRACEBACK_CHARS:]
        if self._as_json:
            return json.dumps(line | extra | ({"exception": exception} if exception else {}))
        fields = "".join(f" {name}={_one_line(str(value))}" for name, value in extra.items())
        text = "{time} {level:7} {logger}: ".format_map(line) + _one_line(str(line["message"])) + fields
        return f"{text}\n{exception}" if exception else text


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _bounded(value: object) -> object:
    """Return a number unchanged, anything else as text of bounded length."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MOST_VALUE_CHARS else f"{text[:_MOST_VALUE_CHARS]}..."


# -- the queue -----------------------------------------------------------------------------------------------


class QueuedHandler(logging.Handler):
    """Writes to a file descriptor from its own thread. `close` ends the thread.

    A descriptor has no buffer, whose lock a stalled write would hold when the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}
        """For each place in the code the end of its window, and the lines in the window. So nothing that a
        client sends is a key."""
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._unreported = 0
        """Lines dropped since the last line that was written."""
        self.counts = {"dropped": 0, "repeated": 0}
        """Lines that were not written, for metrics."""
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held, on any thread."""
        lines = self.lines_of(record, now=time.monotonic())
        if lines > _LINES_A_WINDOW:
            self.counts["repeated"] += 1
            return
        notes = {"lines_dropped": self._unreported} if self._unreported else {}
        if lines == _LINES_A_WINDOW:
            notes["more_left_out_for_s"] = int(_WINDOW_S)
        try:
            vars(record).update(notes)
            self._lines.put_nowait(self.format(record))
            self._unreported = 0
        except Exception:  # noqa: BLE001 - a full queue, or an error in the text of a value
            self.counts["dropped"] += 1
            self._unreported += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most a second."""
        deadline = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.002)

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_FLUSH_S)
        super().close()

    def lines_of(self, record: logging.LogRecord, *, now: float) -> int:
        """Return the number of lines from this place in this window."""
        place = (record.pathname, record.lineno)
        until, lines = self._windows.get(place, (0.0, 0))
        if now >= until:
            until, lines = now + _WINDOW_S, 0
        self._windows[place] = until, lines + 1
        return lines + 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            data = f"{line}\n".encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nothing reads the log any more
                self.counts["dropped"] += 1
            finally:
                self._lines.task_done()


def setup_logging(config: Log, *, descriptor: int = 2) -> QueuedHandler:
    """Send all logs to a descriptor (standard error) in the configured form. Replaces an earlier call."""
    handler = QueuedHandler(descriptor)
    handler.setFormatter(LineFormatter(as_json=config.format == "json"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, QueuedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    logging.getLogger("hpack").setLevel(logging.INFO)  # at `debug` it writes a line for each header
    return handler
