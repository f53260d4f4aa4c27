"""The log lines about servers that are left out."""

from __future__ import annotations

import logging

import pytest

from epp.observe.telemetry.sick_servers import SickServersLog


def test_server_is_named_once_when_it_is_left_out_and_once_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = SickServersLog()
    for left_out in (
        {},
        {"a": "its answers fail"},
        {"a": "its answers fail"},
        {"a": "its requests hang"},
        {},
    ):
        log.look(left_out)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "a gets only trial requests: its answers fail"),
        ("INFO", "a gets requests again"),
    ]
