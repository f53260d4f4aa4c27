"""Charts are whole SVG with the values that they were given."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from epp.tools.replay.charts import Bars, bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: str) -> tuple[ET.Element, list[str]]:
    root = ET.fromstring(chart)
    return root, [text for text in root.itertext() if text.strip()]


def test_bars_are_as_high_as_their_values_and_missing_values_have_no_bar() -> None:
    groups = [Bars("p50", [1.0, 2.0]), Bars("p90", [4.0, None])]
    root, texts = parsed(bar_chart("Title <&>", ["one", "two"], groups, y_label="ms"))
    heights = [
        float(r.attrib["height"]) for r in root.iter(f"{SVG}rect") if r.attrib["width"] not in ("640", "10")
    ]
    assert len(heights) == 3
    assert heights[1] / heights[0] == pytest.approx(2.0, abs=0.02)
    assert heights[2] / heights[0] == pytest.approx(4.0, abs=0.02)
    assert {"Title <&>", "one", "two", "p50", "p90", "ms"} <= set(texts)


def test_a_chart_with_nothing_to_show_or_too_many_series_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value over zero"):
        bar_chart("t", ["a"], [Bars("x", [0.0])], y_label="")
    with pytest.raises(ValueError, match="at most 6 series, not 7"):
        bar_chart("t", list("abcdefg"), [Bars("x", [1.0] * 7)], y_label="")
