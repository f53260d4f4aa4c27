"""A mistake on the command line of `model-server` gives one line, without a traceback."""

from pathlib import Path

import pytest

from model_server.cli import main


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-blocks", "0"], "--num-blocks must be at least 1"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--port", "99999"], "--port 99999"),
        (["--port-file", "/nowhere/port.txt"], "there is no folder /nowhere"),
        (["--lora", "=x"], "needs a name"),
        (["--cost", "/nowhere/costs.yaml"], "/nowhere/costs.yaml cannot be read"),
    ],
)
def test_an_invalid_flag_of_serve_is_an_error_of_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_the_error_for_an_invalid_flag_does_not_list_all_other_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "abc"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "invalid int value: 'abc'" in said
    assert said.count("\n") <= 2


def test_the_error_for_an_unknown_host_names_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "nowhere.invalid", "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("model-server: --host nowhere.invalid: ")


def test_a_file_that_is_not_yaml_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("hello: [\n")
    assert main(["serve", "--cost", str(file)]) != 0
    said = capsys.readouterr().err
    assert str(file) in said
    assert said.count("\n") == 1
