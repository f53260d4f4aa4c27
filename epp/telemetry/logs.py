"""Structured logs on standard error: one line for each event, as JSON or text, with the message and the
fields of `extra`.

The picker logs nothing that a client wrote except the request id, and never a prompt. Control characters are
escaped, so no value can start a line of its own. Values are cut to a bounded length. `queued` writes the
lines, so that logging never waits. Called once by `app`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from epp.config.settings import Log
from epp.telemetry.queued import QueuedHandler

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MOST_VALUE_CHARS: Final = 2_000
_MOST_TRACEBACK_CHARS: Final = 16_000
"""The end of a traceback is kept, since it says what went wrong."""


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """The call's `extra` fields. `request_id` comes first, since people search for it."""
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
    """A number unchanged, anything else as text of bounded length."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MOST_VALUE_CHARS else f"{text[:_MOST_VALUE_CHARS]}..."


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
    return handler
