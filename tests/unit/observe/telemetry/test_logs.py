"""Log lines: one for each event, whatever the event contains."""

from __future__ import annotations

import io
import json
import logging
from typing import Literal

import pytest
from hpack import Decoder, Encoder

from epp.config.settings import Log
from epp.observe.telemetry.logs import setup_logging

pytestmark = pytest.mark.usefixtures("restored_root")


def logged(form: Literal["json", "text"], message: str, *args: object, **extra: object) -> str:
    stream = io.StringIO()
    handler = setup_logging(Log(format=form), stream=stream)
    logging.getLogger("epp.test").warning(message, *args, extra=extra)
    handler.flush()
    return stream.getvalue()


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
    stream = io.StringIO()
    handler = setup_logging(Log(), stream=stream)
    try:
        int("boom")
    except ValueError:
        logging.getLogger("epp.test").exception("failed")
    handler.flush()
    line = json.loads(stream.getvalue())
    assert "ValueError: invalid literal" in line["exception"]


def test_a_debug_log_has_no_line_for_each_header_that_is_decoded() -> None:
    stream = io.StringIO()
    handler = setup_logging(Log(level="debug"), stream=stream)
    Decoder().decode(Encoder().encode([("a", "b")]))
    logging.getLogger("epp").debug("seen")
    handler.close()
    assert "seen" in stream.getvalue()
    assert "hpack" not in stream.getvalue()


def test_a_second_setup_replaces_the_handler_and_the_level_is_respected() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging(Log(level="info"), stream=first)
    handler = setup_logging(Log(level="error"), stream=second)
    logging.getLogger("epp.test").warning("quiet")
    logging.getLogger("epp.test").error("loud")
    handler.flush()
    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["message"] == "loud"


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_has_a_bounded_length_whatever_is_logged(form: Literal["json", "text"]) -> None:
    line = logged(form, "bad id %s", "x" * 10**6, request_id="y" * 10**6)
    assert len(line) < 10_000
    assert line.endswith("\n")
