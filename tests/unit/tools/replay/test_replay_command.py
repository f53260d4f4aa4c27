"""`epp replay`: a recording is replayed with several policies, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.serve import cli
from tests.unit.tools.replay.recordings import recording_file


def test_the_command_prints_the_policies_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "tried.yaml"
    policy.write_text(
        "apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: tried}\nspec: {rule: random}\n"
    )
    told = tmp_path / "told.json"
    options = ["--policy", str(policy), "--rule", "round-robin", "--json", str(told)]
    assert cli.main(["replay", str(recording_file(tmp_path)), *options]) == 0
    heads = ["as recorded", "recorded (least-cost)", "tried (random)", "round-robin"]
    shown = capsys.readouterr().out
    assert all(head in shown for head in heads)
    columns = json.loads(told.read_text())
    assert list(columns) == heads
    assert columns["recorded (least-cost)"]["hit_ratio"] > columns["round-robin"]["hit_ratio"]


def test_the_table_for_another_load_has_no_column_of_recorded_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(recording_file(tmp_path)), "--load", "1.3"]) == 0
    shown = capsys.readouterr().out
    assert "at 1.3 times the recorded rate" in shown
    assert "as recorded" not in shown


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["no-such-file"], "cannot read no-such-file"),
        (["{recording}", "--policy", "no-such-policy"], "no-such-policy: No such file"),
    ],
)
def test_the_error_names_an_unusable_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    given = [option.format(recording=recording_file(tmp_path)) for option in options]
    assert cli.main(["replay", *given]) == 2
    assert fault in capsys.readouterr().err
