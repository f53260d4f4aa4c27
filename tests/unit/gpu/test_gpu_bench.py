"""`make bench-gpu`: outcomes, and runs that go on where an earlier run stopped."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import __main__ as command
from bench.gpu import steps
from bench.gpu.steps import Step


def step(name: str, *, missing: str = "") -> Step:
    return Step(name, "001-6", "some.module", ("--rows", "001-6"), 5.0, 100.0, missing)


class Runs:
    """Ends steps as the test says, and writes the figures of the steps that succeed."""

    def __init__(self, **statuses: int | None) -> None:
        self.statuses = statuses
        self.ran: list[str] = []
        self.given_s: list[float] = []

    def __call__(self, step: Step, command: list[str]) -> tuple[int | None, str]:
        self.ran.append(step.name)
        self.given_s.append(step.timeout_s)
        status = self.statuses.get(step.name, 0)
        if status == 0:
            Path(command[-1]).write_text("{}")
        return status, f"figures of {step.name}"


def test_a_second_run_repeats_only_unfinished_steps(tmp_path: Path) -> None:
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


def test_a_step_that_takes_too_long_ends_with_its_processes(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    program = f"trap 'echo asked to end; exit' TERM; (echo begun; exec sleep 6000) > {fifo} & wait"
    begun, slow = b"", replace(step("slow"), timeout_s=0.5)
    with os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), True)
        while not begun:  # otherwise the machine was so busy that the step had not begun
            slow = replace(slow, timeout_s=2 * slow.timeout_s)
            status, output = command.run(slow, ["bash", "-c", program])
            begun = pipe.read()  # until no process holds the pipe
    assert (status, output, begun) == (None, "asked to end\n", b"begun\n")


def test_without_a_gpu_the_command_says_so_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--folder", str(tmp_path / "made")])
    monkeypatch.setattr(steps, "NEEDED", ())
    monkeypatch.setattr(command, "gpu_name", lambda _: "")
    with pytest.raises(SystemExit):
        command.main()
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_same_rows_run_on_a_gpu_and_tiny_and_are_planned_for_450_s() -> None:
    *wanted, _, _ = steps.on_gpu("cuda")
    wanted_rows = {one.rows for one in wanted}
    assert wanted[0].rows == "step-times"
    assert wanted_rows == {row for one in steps.tiny() for row in one.rows.split()}
    assert {"001-6", "001-7", "001-8", "002-5", "003-5"} <= wanted_rows
    assert sum(one.planned_s for one in wanted) <= 450
    assert all(one.planned_s < one.timeout_s for one in steps.on_gpu("cuda"))
