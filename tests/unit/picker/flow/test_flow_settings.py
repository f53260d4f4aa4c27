"""The settings of flow control refuse values that make no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.picker.flow.flow_settings import FlowSettings


def test_an_error_of_settings_names_the_field() -> None:
    for wrong in ({"ttft_s": 0.0}, {"max_forecasts": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(FlowSettings(), **wrong)
