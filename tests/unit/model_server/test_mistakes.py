"""A mistake on the command line of `model-server` gives one line, without a traceback."""

import pytest

from model_server.cli import main

EVENTS = ("--kv-events-endpoint", "tcp://*:5557")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-blocks", "0"], "--num-blocks must be at least 1"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--num-blocks", "10", "--max-model-len", "161"], "no room for a longer request"),
        (["--port", "99999"], "--port 99999 is not a port"),
        (["--port-file", "/nowhere/port.txt"], "there is no folder /nowhere"),
        (["--speed", "0"], "positive"),
        (["--lora", "=x"], "needs a name"),
        (["--lora", "x", "--lora", "x"], "loaded already"),
        (["--max-queue", "0"], "--max-queue"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s"),
        (["--max-unused-blocks", "-1"], "max_unused_blocks"),
        (["--cost", "/nowhere/costs.yaml"], "/nowhere/costs.yaml cannot be read"),
        (["--runner", "hf", "--threads", "0"], "--threads"),
        (["--kv-events-endpoint", "localhost:5557"], "an example of an address is tcp://*:5557"),
        (["--kv-events-replay-endpoint", "tcp://*:5558"], "give both"),
        ([*EVENTS, "--kv-events-replay-endpoint", "tcp://*:5557"], "two addresses"),
        ([*EVENTS, "--no-prefix-caching"], "switched off"),
        ([*EVENTS, "--kv-events-buffer", "-1"], "replay buffer"),
        ([*EVENTS, "--partial-blocks"], "full blocks only"),
    ],
)
def test_an_invalid_flag_of_serve_is_an_error_of_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_the_error_for_an_invalid_flag_does_not_list_all_other_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "abc"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "invalid int value: 'abc'" in printed
    assert printed.count("\n") <= 2


def test_the_error_for_an_unknown_host_names_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "nowhere.invalid", "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("model-server: --host nowhere.invalid: ")


def test_the_first_help_names_the_commands_and_not_the_runners(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["serve", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
    first, _, described = capsys.readouterr().out.partition("usage: model-server serve")
    assert all(f"\n    {command}" in first for command in ("serve", "fetch", "lora-sync"))
    assert ("--runner" in first, "--runner" in described) == (False, True)
