"""The command itself: a port of its choice, draining on SIGTERM, and messages for wrong settings."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_server.cli import main

COMMAND = [sys.executable, "-m", "model_server", "serve", "--port", "0"]


@contextmanager
def serving_process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), line
            yield process, int(line.rsplit(":", 1)[1])
        finally:
            process.kill()


@pytest.mark.core
def test_stream_under_way_finishes_after_sigterm_and_nothing_new_is_taken(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with serving_process("--port-file", str(port_file), "--decode-step-ms", "5") as (process, port):
        assert port_file.read_text() == f"{port}\n"
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": "Hello", "stream": True, "max_tokens": 60, "ignore_eos": True}
        client.request("POST", "/v1/completions", json.dumps(body))
        answer = client.getresponse()
        assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining: 1 requests to finish\n"
        events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert len(events) == 62
        client.close()
        assert process.wait(timeout=60) == 0
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_drain_at_once(number: signal.Signals, status: int) -> None:
    with serving_process("--drain-timeout-s", "10000", "--decode-step-ms", "5") as (process, port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": "Hello", "stream": True, "max_tokens": 60_000, "ignore_eos": True}
        client.request("POST", "/v1/completions", json.dumps(body))
        answer = client.getresponse()
        assert answer.readline().startswith(b"data: ")
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining: 1 requests to finish\n"
        assert answer.readline() == b"\n"  # the stream goes on
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        answer.close()
        client.close()


def test_the_adapters_and_names_on_the_command_line_are_served() -> None:
    with serving_process("--model", "base", "--served-model-name", "b", "--lora", "x=/x", "--lora", "y") as (
        process,
        port,
    ):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("GET", "/v1/models")
        cards = json.loads(client.getresponse().read())["data"]
        client.close()
        assert [(card["id"], card["root"]) for card in cards] == [("b", "base"), ("x", "/x"), ("y", "y")]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def test_a_taken_port_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_process() as (_, port):
        assert main(["serve", "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


def test_an_unusable_address_for_kv_events_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", "--port", "0", "--kv-events-endpoint", address]) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert address in printed


def test_the_help_has_examples_and_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:" in printed
    for flag in ("--lora", "--num-blocks", "--speed", "--port-file", "--max-num-batched-tokens"):
        assert flag in printed
