"""`model-server calibrate` against a real server process of this repository, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_server.calibrate.cost_file import read_costs
from model_server.cli import main
from tests.integration.test_model_server_process import serving_process

FLAGS = ("--max-prompt-tokens", "600")


def test_a_server_is_measured_over_http_and_serve_reads_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times are those of a busy machine's clock. A unit test with a virtual clock checks how close the
    figures are.
    """
    file = tmp_path / "costs.yaml"
    with serving_process("--prefill-tokens-per-s", "3000", "--decode-step-ms", "8", "--model", "m") as (
        _,
        port,
    ):
        assert main(["calibrate", "--url", f"http://127.0.0.1:{port}", *FLAGS]) == 0
    file.write_text(capsys.readouterr().out)
    costs = read_costs(file)
    assert costs.prefill_tokens_per_s > 0
    assert costs.decode_step_s > 0
    with serving_process("--cost", str(file)) as (_, port):
        assert port


def test_tokens_that_come_together_cannot_be_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_process("--stream-interval", "4") as (_, port):
        assert main(["calibrate", "--url", f"http://127.0.0.1:{port}", *FLAGS]) == 1
    assert "--stream-interval 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
        (["--url", "localhost:8000"], 2, "http URL"),
        (["--url", "http://127.0.0.1:9", "--max-prompt-tokens", "9"], 2, "at least 64"),
    ],
)
def test_a_server_that_cannot_be_measured_causes_one_line_of_error(
    flags: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *flags]) == status
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said
