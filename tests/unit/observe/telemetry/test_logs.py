"""Log lines: one for each event, whatever the event contains. Logging never delays its caller."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import Literal

import pytest
from hpack import Decoder, Encoder

from epp.config.settings import Log
from epp.observe.telemetry.logs import LineFormatter, QueuedHandler, setup_logging

pytestmark = pytest.mark.usefixtures("restored_root")


def written(config: Log, log: Callable[[], object]) -> str:
    """Return what is written while `log` runs."""
    with TemporaryFile() as file:
        setup_logging(config, descriptor=file.fileno())
        log()
        setup_logging(config).close()
        file.seek(0)
        return file.read().decode()


def logged(form: Literal["json", "text"], message: str, *args: object, **extra: object) -> str:
    logger = logging.getLogger("epp.test")
    return written(Log(format=form), lambda: logger.warning(message, *args, extra=extra))


def test_json_carries_the_extra_fields() -> None:
    line = json.loads(logged("json", "picked %s", "a", worker=2, request_id="r1"))
    assert line["message"] == "picked a"
    assert (line["level"], line["logger"], line["worker"], line["request_id"]) == (
        "warning",
        "epp.test",
        2,
        "r1",
    )
    assert line["time"].endswith("Z")


def test_extra_fields_cannot_replace_the_message() -> None:
    assert json.loads(logged("json", "real", level="debug", logger="x"))["level"] == "warning"


def test_text_lines_are_readable() -> None:
    line = logged("text", "serving", worker=0, request_id="r1")
    assert line.endswith("warning epp.test: serving request_id=r1 worker=0\n")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_value_cannot_start_a_new_line(form: Literal["json", "text"]) -> None:
    line = logged(form, "bad id %s", "x\n2026 forged\r\x1b[31m\ud800", request_id="y\u2028z")
    assert line.count("\n") == 1
    assert line.isascii()
    assert line.strip().isprintable()


def test_an_exception_is_part_of_its_line() -> None:
    def fail() -> None:
        try:
            int("boom")
        except ValueError:
            logging.getLogger("epp.test").exception("failed")

    assert "ValueError: invalid literal" in json.loads(written(Log(), fail))["exception"]


def test_a_debug_log_has_no_line_for_each_header_that_is_decoded() -> None:
    def log() -> None:
        Decoder().decode(Encoder().encode([("a", "b")]))
        logging.getLogger("epp").debug("seen")

    found = written(Log(level="debug"), log)
    assert "seen" in found
    assert "hpack" not in found


def test_a_second_setup_replaces_the_handler_and_the_level_is_respected() -> None:
    def log() -> None:
        logging.getLogger("epp.test").warning("quiet")
        logging.getLogger("epp.test").error("loud")

    setup_logging(Log(level="info"), descriptor=-1)
    assert json.loads(written(Log(level="error"), log))["message"] == "loud"


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_has_a_bounded_length_whatever_is_logged(form: Literal["json", "text"]) -> None:
    line = logged(form, "bad id %s", "x" * 10**6, request_id="y" * 10**6)
    assert len(line) < 10_000
    assert line.endswith("\n")


def record(text: str, *args: object, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("epp.test", logging.INFO, "a.py", line, text, args, None)


def a_handler(descriptor: int) -> QueuedHandler:
    handler = QueuedHandler(descriptor)
    handler.setFormatter(LineFormatter(as_json=False))
    return handler


def test_a_stalled_reader_does_not_block_the_picker() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, encoding="utf-8") as reader:
        handler = a_handler(write_end)
        for n in range(4_000):
            # a pipe holds 64 KiB: a write would block for ever
            handler.handle(record("%d %s", n, "x" * 200, line=n))
        assert handler.counts["dropped"] >= 1_000
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(reader), daemon=True)
        reading.start()
        handler.flush()
        handler.handle(record("after"))
        handler.close()
        os.close(write_end)
        reading.join(60)
    numbers = [int(line.split()[3]) for line in lines if "after" not in line]
    assert numbers == sorted(numbers)
    assert len(numbers) + handler.counts["dropped"] == 4_000
    counts = [int(line.split("lines_dropped=")[1]) for line in lines if "lines_dropped=" in line]
    assert sum(counts) == handler.counts["dropped"]
    assert "after lines_dropped=" in lines[-1]


def test_a_place_that_logs_very_many_lines_is_left_out_for_a_while() -> None:
    with TemporaryFile("r+") as file:
        handler = a_handler(file.fileno())
        for n in range(107):
            handler.handle(record("refused: %d", n))
        handler.handle(record("another place", line=2))
        assert handler.counts["repeated"] == 7
        handler.close()
        file.seek(0)
        messages = [line.partition("epp.test: ")[2].strip() for line in file]
    assert messages == [
        *(f"refused: {n}" for n in range(99)),
        "refused: 99 more_left_out_for_s=10",
        "another place",
    ]


def test_the_window_of_repeated_lines_ends_by_itself() -> None:
    handler = a_handler(-1)
    assert [handler.lines_of(record("a"), now=now) for now in (1.0, 2.0, 10.9, 11.0)] == [1, 2, 3, 1]
    handler.close()


def test_a_closed_stream_and_a_value_without_text_raise_nothing() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    handler = a_handler(-1)
    handler.handle(record("%s", Broken()))
    handler.handle(record("to nobody"))
    handler.close()
    assert handler.counts["dropped"] == 2


STALLED = """
import logging
from epp.config.settings import Log
from epp.observe.telemetry.logs import setup_logging
setup_logging(Log())
for n in range(5000):
    logging.getLogger("epp").error("%d %s", n, "x" * 1000)
"""


@pytest.mark.slow
def test_a_process_with_an_unread_standard_error_ends_with_its_own_status() -> None:
    with subprocess.Popen([sys.executable, "-c", STALLED], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        assert process.stderr is not None
