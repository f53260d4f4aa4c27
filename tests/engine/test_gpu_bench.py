"""`make bench-gpu`: every step has an outcome, a run goes on where one stopped, and all of it runs at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import __main__ as command
from bench.gpu import steps
from bench.gpu.steps import Step


def step(name: str, *, missing: str = "") -> Step:
    return Step(name, "001-6", "some.module", ("--rows", "001-6"), 5.0, missing)


class Runs:
    """Ends steps as it is told, and leaves figures of those that succeed."""

    def __init__(self, **statuses: int | None) -> None:
        self.statuses = statuses
        self.ran: list[str] = []

    def __call__(self, step: Step, command: list[str]) -> tuple[int | None, str]:
        self.ran.append(step.name)
        status = self.statuses.get(step.name, 0)
        if status == 0:
            Path(command[-1]).write_text("{}")
        return status, f"figures of {step.name}"


def test_a_run_goes_on_with_what_is_not_done_and_tells_every_step(tmp_path: Path) -> None:
    wanted = [step("good"), step("bad"), step("slow"), step("away", missing="there is no such thing")]
    first = Runs(bad=1, slow=None)
    found = command.run_all(wanted, folder=tmp_path, device="d", limit_s=1000, run=first)
    assert [one.status for one in found] == ["done", "failed", "out of time", "not possible here"]
    second = Runs()
    found = command.run_all(wanted, folder=tmp_path, device="d", limit_s=1000, run=second)
    assert second.ran == ["bad", "slow"]
    assert [one.status for one in found] == ["done", "done", "done", "not possible here"]
    page = (tmp_path / "page.md").read_text()
    assert all(text in page for text in ("figures of good", "figures of bad", "there is no such thing"))
    third = Runs()
    command.run_all(wanted, folder=tmp_path, device="another", limit_s=1000, run=third)
    assert third.ran == ["good", "bad", "slow"], "another device's figures are not this one's"


def test_steps_that_had_no_time_are_told_as_not_run(tmp_path: Path) -> None:
    found = command.run_all([step("a"), step("b")], folder=tmp_path, device="d", limit_s=-1, run=Runs())
    assert [one.status for one in found] == ["not run", "not run"]
    assert "| b | not run |" in (tmp_path / "page.md").read_text()


def test_the_same_rows_are_run_on_a_gpu_and_at_tiny_sizes() -> None:
    assert {one.rows for one in steps.on_gpu("cuda")} == {one.rows for one in steps.tiny()}
    assert sum(one.timeout_s for one in steps.on_gpu("cuda")) <= 1100
    assert {"001-6", "001-7", "001-8", "002-5", "003-5"} <= {one.rows for one in steps.tiny()}


@pytest.mark.timeout(1500)
def test_every_step_runs_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--tiny", "--folder", str(tmp_path), "--limit-s", "3000"])
    status = command.main()
    told = capsys.readouterr().out
    outcomes = json.loads((tmp_path / "state.json").read_text())
    assert status == 0, told
    assert {one["status"] for one in outcomes} == {"done", "not possible here"}
    assert "without / with" in told
    assert len(list(tmp_path.glob("*.json"))) == 1 + sum(one["status"] == "done" for one in outcomes)
