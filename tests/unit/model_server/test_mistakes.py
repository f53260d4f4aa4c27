"""A mistake on the command line of `model-server` gives one line, without a traceback."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_calibrating_a_server_that_serves_no_models_is_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with a_web_page() as url:
        assert main(["calibrate", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "no list of models" in said
    assert said.count("\n") == 1


@contextmanager
def a_web_page() -> Iterator[str]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
