"""Log lines: one for each event, whatever the event contains."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import Literal

import pytest
from hpack import Decoder, Encoder

from epp.config.settings import Log
from epp.observe.telemetry.logs import setup_logging

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
