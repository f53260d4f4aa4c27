"""Writes structured logs to standard error: one line for each event, as JSON or text, with the message and
the fields of `extra`. Nothing waits for the reader of the log.

The picker logs nothing that a client wrote except the request id, and never a prompt. Control characters are
escaped, so no value can start a line of its own. Values are cut to a bounded length.

Each line is formatted where it is logged, put into a bounded queue, and written by a separate thread. When
the reader of standard error stalls, the queue fills, and further lines are dropped and counted. The next line
then says how many were dropped. If one place in the code logs very many lines, a summary replaces them,
because clients can cause some of these lines. `setup_logging` is called once by `app`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TextIO

from epp.config.settings import Log

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MOST_VALUE_CHARS: Final = 2_000
_MOST_TRACEBACK_CHARS: Final = 16_000
"""The end of a traceback is kept, since it says what went wrong."""
_MOST_WAITING: Final = 2_000
_WINDOW_S: Final = 10.0
_LINES_A_WINDOW: Final = 100
"""Most lines from one place in the code. Further lines in the window become one summary."""
_LOOK_S: Final = 1.0
_FLUSH_S: Final = 1.0
"""The end of the process waits no longer than this for a reader."""


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """Return the call's `extra` fields. `request_id` comes first, since people search for it."""
    extra = {name: _bounded(value) for name, value in vars(record).items() if name not in _STANDARD}
    first = {"request_id": extra.pop("request_id")} if "request_id" in extra else {}
    return first | extra


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the extra fields, then the exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
        }
        for name, value in _extra(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_MOST_TRACEBACK_CHARS:]
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """For people at a terminal: time, level, logger, message, then key=value."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={_one_line(str(value))}" for name, value in _extra(record).items())
        level, message = record.levelname.lower(), _one_line(str(_bounded(record.getMessage())))
        line = f"{_time(record)} {level:7} {record.name}: {message}{extra}"
        if not record.exc_info:
            return line
        return f"{line}\n{self.formatException(record.exc_info)[-_MOST_TRACEBACK_CHARS:]}"


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


Place = tuple[str, int]


@dataclass(slots=True)
class LogCounts:
    """The numbers of lines that were not written, for metrics."""

    dropped: int = 0
    repeated: int = 0


@dataclass(slots=True)
class _Window:
    until: float
    lines: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = field(default=None, repr=False)


class Repeats:
    """Decides which lines are written, and which are only counted: by place in the code, so nothing that a
    client sends is a key.
    """

    def __init__(self) -> None:
        self._windows: dict[Place, _Window] = {}

    def admits(self, record: logging.LogRecord, *, now: float) -> bool:
        """Return whether to write this line. Debug lines are always written, since somebody asked for
        them.
        """
        if record.levelno < logging.INFO:
            return True
        window = self._windows.setdefault((record.pathname, record.lineno), _Window(now + _WINDOW_S))
        if window.lines < _LINES_A_WINDOW:
            window.lines += 1
            return True
        window.left_out += 1
        window.last = record
        return False

    def ended(self, *, now: float) -> Iterator[tuple[logging.LogRecord, int]]:
        """Yield the last line of each window that is over, and how many lines the window left out."""
        for place in [place for place, window in self._windows.items() if window.until <= now]:
            window = self._windows.pop(place)
            if window.last is not None:
                yield window.last, window.left_out


class QueuedHandler(logging.Handler):
    """Writes to `stream` from its own thread. `close` ends the thread."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._repeats = Repeats()
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._unreported = 0
        """Lines dropped since the last line that was written."""
        self.counts = LogCounts()
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held, on any thread."""
        if self._repeats.admits(record, now=time.monotonic()):
            self._put(record)
        else:
            self.counts.repeated += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's signature
        """Called for a line that cannot be formatted. logging's own would write to standard error."""
        self._drop()

    def flush(self) -> None:
        """Wait until all lines are written, at most a second."""
        deadline = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.002)

    def close(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._sum_up(at=float("inf"))
        self.flush()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH_S if not self._lines.full() else 0)
        super().close()

    def _put(self, record: logging.LogRecord, *, left_out: int = 0) -> None:
        try:
            line = self.format(record)
            if left_out:
                line = self.format(_summary(record, left_out))
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop()
        except Exception:  # noqa: BLE001 - an error in the text of a value must not reach the caller
            self.handleError(record)

    def _drop(self) -> None:
        self.counts.dropped += 1
        self._unreported += 1

    def _sum_up(self, *, at: float) -> None:
        for record, left_out in self._repeats.ended(now=at):
            self._put(record, left_out=left_out)

    # -- the thread ------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look()
                continue
            try:
                if line is None:
                    return
                self._write_line(line)
            finally:
                self._lines.task_done()
            if self._lines.empty():
                self._look()

    def _look(self) -> None:
        """Write summaries of windows that are over, and report dropped lines."""
        with self.lock or contextlib.nullcontext():
            self._sum_up(at=time.monotonic())
            num_dropped, self._unreported = self._unreported, 0
        if num_dropped:
            self._write_line(self.format(_dropped(num_dropped)))

    def _write_line(self, line: str) -> None:
        try:
            if self._descriptor is None:
                self._stream.write(f"{line}\n")
            else:
                _write_all(self._descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        except (OSError, ValueError):  # nothing reads the log any more
            self.counts.dropped += 1


def _descriptor_of(stream: TextIO) -> int | None:
    """Return the stream's file descriptor. Writing to it avoids the stream's own buffer, whose lock a stalled
    write would hold when the process ends.
    """
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _summary(record: logging.LogRecord, left_out: int) -> logging.LogRecord:
    text = f"{left_out} more lines like this one were left out: {record.getMessage()}"
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, (), None)


def _dropped(count: int) -> logging.LogRecord:
    text = f"{count} log lines were dropped, because standard error was not read fast enough"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)


def setup_logging(config: Log, *, stream: TextIO | None = None) -> QueuedHandler:
    """Send all logs to `stream` (standard error) in the configured form. Replaces an earlier call."""
    handler = QueuedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, QueuedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    logging.getLogger("hpack").setLevel(logging.INFO)  # at `debug` it writes a line for each header
    return handler
