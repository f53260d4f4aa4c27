"""A recording is replayed: the real picker on simulated servers, with several policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from epp import cli
from epp.config.policy import DEFAULT_POLICY
from epp.replay.reading import read
from epp.replay.simulate import Setting, run
from epp.replay.trace import Trace
from tests.unit.replay.recordings import record, record_simulation


def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording.jsonl"
    record(path)
    return path


def a_trace(tmp_path: Path) -> Trace:
    return read([recording(tmp_path)])


def never(_: float) -> None:
    return


def test_the_same_replay_gives_the_same_figures(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    first, second = (run(trace, DEFAULT_POLICY, Setting(seed=5), progress=never) for _ in range(2))
    assert first == second
    assert first.counted == 108, "the first tenth warms the caches"
    assert first.failed == 0


def test_a_replay_gives_about_the_figures_of_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    was = record_simulation(path, requests=300)
    trace = read([path])
    assert trace.policy is not None
    found = run(trace, trace.policy, Setting(), progress=never)
    assert found.hit_ratio == pytest.approx(was.hit_ratio, abs=0.03)
    assert found.ttft_mean_s == pytest.approx(was.ttft_mean_s, rel=0.25)


def test_more_load_waits_longer_and_more_servers_wait_less(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    slow = replace(trace, servers=[replace(s, prefill_tokens_per_s=400.0) for s in trace.servers])
    usual = run(slow, DEFAULT_POLICY, Setting(), progress=never)
    busy = run(slow, DEFAULT_POLICY, Setting(load=4.0), progress=never)
    relieved = run(slow, DEFAULT_POLICY, Setting(load=4.0, servers=12), progress=never)
    assert usual.ttft_mean_s is not None
    assert busy.ttft_mean_s is not None
    assert relieved.ttft_mean_s is not None
    assert busy.ttft_mean_s > 1.5 * usual.ttft_mean_s
    assert relieved.ttft_mean_s < busy.ttft_mean_s
    assert len(relieved.by_server) == 12


def test_progress_is_told_as_requests_end(tmp_path: Path) -> None:
    shares: list[float] = []
    run(a_trace(tmp_path), DEFAULT_POLICY, Setting(), progress=shares.append)
    assert len(shares) > 50
    assert all(0 <= share < 1 for share in shares)


def test_the_command_prints_the_policies_side_by_side_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "tried.yaml"
    policy.write_text(
        "apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: tried}\nspec: {rule: random}\n"
    )
    drawn, told = tmp_path / "drawn.svg", tmp_path / "told.json"
    options = ["--policy", str(policy), "--rule", "round-robin", "--picture", str(drawn), "--json", str(told)]
    assert cli.main(["replay", str(recording(tmp_path)), *options]) == 0
    heads = ["as recorded", "recorded (least-cost)", "tried (random)", "round-robin"]
    shown = capsys.readouterr().out
    assert all(head in shown for head in heads)
    columns = json.loads(told.read_text())
    assert list(columns) == heads
    assert columns["recorded (least-cost)"]["hit_ratio"] > columns["round-robin"]["hit_ratio"]
    text = "".join(ET.fromstring(drawn.read_text()).itertext())
    assert all(head in text for head in heads)
    assert all(title in text for title in ("Token hit rate", "Time to first token", "Requests by server"))


def test_another_load_leaves_out_the_column_of_what_really_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(recording(tmp_path)), "--load", "1.3"]) == 0
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
def test_what_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    given = [option.format(recording=recording(tmp_path)) for option in options]
    assert cli.main(["replay", *given]) == 2
    assert fault in capsys.readouterr().err
