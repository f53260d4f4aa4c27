"""Which requests are logged by default, and under which id."""

from __future__ import annotations

import logging

import pytest

from epp.base.errors import BadRequestError, NoEndpointError
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.events import Refused


def test_a_refusal_is_logged_with_its_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics(decisions=DecisionRing(maxlen=0), state=PickerStatus)
    metrics.on_event(Refused("r-1", BadRequestError("not JSON", reason="bad_json")))
    metrics.on_event(Refused("r-2", NoEndpointError("no server", reason="no_ready_endpoint")))
    shown = [(r.levelname, vars(r)["request_id"], vars(r)["status"]) for r in caplog.records]
    assert shown == [("INFO", "r-1", 400), ("WARNING", "r-2", 503)]
