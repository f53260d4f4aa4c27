"""Charts are whole SVG with the values that they were given."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from bench.line_chart import Line, line_chart
from epp.replay.charts import Bars, bar_chart

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


def test_lines_go_through_their_points_and_dashed_lines_show_no_dots() -> None:
    lines = [Line("a", [(1.0, 1.0), (3.0, 2.0)]), Line("b", [(1.0, 2.0), (3.0, 2.0)], dashed=True)]
    root, texts = parsed(line_chart("t", lines, x_label="x", y_label="y"))
    first, second = root.iter(f"{SVG}polyline")
    assert "stroke-dasharray" not in first.attrib
    assert "stroke-dasharray" in second.attrib
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    (left, low), (right, high) = (map(float, point.split(",")) for point in first.attrib["points"].split())
    assert left < right
    assert low > high, "a larger value is higher"
    assert {"1", "3", "a", "b"} <= set(texts)


def test_on_an_axis_of_ratios_equal_ratios_are_equally_far_apart() -> None:
    line = Line("", [(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)])
    root, _ = parsed(line_chart("t", [line], x_label="x", y_label="y", log_x=True))
    (drawn,) = root.iter(f"{SVG}polyline")
    left, middle, right = (float(point.split(",")[0]) for point in drawn.attrib["points"].split())
    assert middle - left == pytest.approx(right - middle, abs=0.2)


def test_an_axis_has_no_more_than_a_dozen_numbers_however_many_points_there_are() -> None:
    line = Line("", [(float(x), 7.0) for x in range(1000, 1100)])
    _, texts = parsed(line_chart("t", [line], x_label="", y_label=""))
    assert 6 <= sum(text.startswith("1,0") for text in texts) <= 12


def test_a_chart_with_nothing_to_show_or_too_many_series_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value over zero"):
        bar_chart("t", ["a"], [Bars("x", [0.0])], y_label="")
    with pytest.raises(ValueError, match="at most 6 series, not 7"):
        bar_chart("t", list("abcdefg"), [Bars("x", [1.0] * 7)], y_label="")
