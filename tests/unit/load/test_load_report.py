"""The report of the load generator, as text and as a page."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.demo.address import Place, announced, running
from bench.load.figures import Figures, RunRecord, together
from bench.load.report import cells, curves, page, text


def figures(ttft_s: float, *, failed: int = 0) -> Figures:
    made = Figures(asked=10 + failed, answered=10, prompt_tokens=1000, cached_tokens=250, output_tokens=50)
    made.first_at, made.last_at = 5.0, 15.0
    for name, value in (("ttft_s", ttft_s), ("answer_s", 1.0), ("inter_token_s", 0.02), ("tokens_per_s", 40)):
        for n in range(10):
            made.measures[name].add(value * (1 + n / 100))
    for _ in range(failed):
        made.fail("status 503", "status 503: <none ready>")
    made.check_integrity()
    return made


def record(label: str, made: Figures) -> RunRecord:
    return RunRecord(label, {"host": "http://gw", "seed": 1}, made)


def test_two_runs_stand_side_by_side_with_ratios_to_the_first() -> None:
    table = {row[0]: row[1:] for row in cells([record("slow", figures(0.4)), record("fast", figures(0.1))])}
    assert table[""] == ["slow", "fast", "fast / slow"]
    assert table["requests"] == ["10", "10", ""]
    assert table["TTFT mean"] == ["418 ms", "104 ms", "0.25x"]
    assert table["answers/s"] == ["1.00", "1.00", "1.00x"]
    assert table["prompt tokens from cache"][:2] == ["25.0%", "25.0%"]


def test_failures_and_the_bottleneck_are_on_both_reports_and_text_is_escaped() -> None:
    made = figures(0.1, failed=2)
    for _ in range(10):
        made.health.note_window(wall_s=1.0, cpu_s=1.0, waited_s=0.0)
    runs = [record("<run>", made)]
    shown, document = text(runs), page(runs, title="A & B", links=[("x", "x.html")])
    for said in (shown, document):
        assert "THE GENERATOR WAS A BOTTLENECK" in said
        assert "10 of 10 seconds" in said
        assert "status 503" in said
    assert "<run>" not in document
    assert "<none ready>" not in document
    assert "A &amp; B" in document


def test_a_run_without_an_answer_still_has_a_report() -> None:
    nothing = Figures(asked=3)
    nothing.fail("refused", "refused: nobody there")
    assert "1 failed by class 'refused'" in text([record("a", nothing)])
    assert "refused: nobody there" in page([record("a", nothing)], title="t")


@pytest.mark.parametrize("ttft_s", [0.0, 0.0001, 0.05, 3.0, 400.0])
def test_curves_are_well_formed_with_marks_on_the_axis(ttft_s: float) -> None:
    svg = ET.fromstring(curves([record("a", figures(ttft_s))], "ttft_s", "TTFT"))
    texts = [element.text or "" for element in svg.iter("text")]
    assert "TTFT" in texts
    assert [name for name in texts if name.endswith((" ms", " s"))]


def test_parts_of_a_run_add_up_and_a_record_is_read_back_from_its_file(tmp_path: Path) -> None:
    whole = together([figures(0.1, failed=1), figures(0.3)])
    assert (whole.asked, whole.answered, whole.failed, whole.unfinished) == (21, 20, 1, 0)
    assert whole.measures["ttft_s"].count == 20
    whole.check_integrity()
    record("a", whole).write(tmp_path / "f.json")
    again = RunRecord.read(tmp_path / "f.json")
    assert again.figures.document() == whole.document()
    assert json.loads((tmp_path / "f.json").read_text())["label"] == "a"


def test_a_running_demo_is_found_and_a_killed_demo_is_ignored(tmp_path: Path) -> None:
    place = Place(os.getpid(), "http://gw", "http://admin", "/policy.yaml", ["http://s1"])
    with announced(place, directory=tmp_path):
        assert running(directory=tmp_path) == [place]
    assert running(directory=tmp_path) == []
    killed = tmp_path / "1.json"
    killed.write_text('{"pid": 999999999, "gateway": "", "admin": "", "policy_file": "", "servers": []}')
    (tmp_path / "2.json").write_text("half a fi")
    assert running(directory=tmp_path) == []
