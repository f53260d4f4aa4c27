"""Logging never delays its caller, and reports how many lines it left out."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from epp.observe.telemetry.logs import QueuedHandler, Repeats


def record(text: str, *args: object, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("epp.test", logging.INFO, "a.py", line, text, args, None)


@contextmanager
def handler_on(stream: TextIO) -> Iterator[QueuedHandler]:
    handler = QueuedHandler(stream)
    try:
        yield handler
    finally:
        handler.close()


def test_a_stalled_reader_does_not_block_the_picker() -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "w", encoding="utf-8") as stream, open(read_end, encoding="utf-8") as reader:  # noqa: PTH123 - descriptors
        handler = QueuedHandler(stream)
        for n in range(4_000):
            # a pipe holds 64 KiB: a write would block for ever
            handler.handle(record("%d %s", n, "x" * 200, line=n))
        assert handler.counts.dropped >= 1_000
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(reader), daemon=True)
        reading.start()
        handler.flush()
        handler.handle(record("after"))
        handler.close()
        stream.close()
        reading.join(60)
    numbers = [int(line.split()[0]) for line in lines if line[0].isdigit() and "dropped" not in line]
    assert numbers == sorted(numbers)
    assert len(numbers) + handler.counts.dropped == 4_000
    told = [int(line.split()[0]) for line in lines if "lines were dropped" in line]
    assert sum(told) == handler.counts.dropped
    assert "after\n" in lines


def test_a_place_that_logs_very_many_lines_is_left_out_for_a_while() -> None:
    stream = io.StringIO()
    with handler_on(stream) as handler:
        for n in range(107):
            handler.handle(record("refused: %d", n))
        handler.handle(record("another place", line=2))
        assert handler.counts.repeated == 7
    assert stream.getvalue().splitlines() == [
        *(f"refused: {n}" for n in range(100)),
        "more lines like the last one are left out for up to 10 s",
        "another place",
    ]


def test_the_window_of_repeated_lines_ends_by_itself() -> None:
    repeats = Repeats()
    assert [repeats.count(record("a"), now=now) for now in (0.0, 1.0, 9.9, 10.0)] == [1, 2, 3, 1]


def test_a_closed_stream_and_a_value_without_text_raise_nothing(tmp_path: Path) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    stream = (tmp_path / "log").open("w")
    handler = QueuedHandler(stream)
    handler.handle(record("%s", Broken()))
    handler.flush()
    stream.close()
    handler.handle(record("to nobody"))
    handler.flush()
    assert handler.counts.dropped >= 2
    handler.close()


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
