"""Typical mistakes of a first hour: each message says where, what was found, and what to write."""

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epp.serve.cli import main
from tests.harness.ports import free_port

HEAD = "apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: p}\n"
GOOD = {
    "config.yaml": "endpointsFile: e.yaml\npolicyFile: p.yaml\n",
    "e.yaml": 'endpoints:\n  - {name: a, address: "10.0.0.1:8000"}\n',
    "p.yaml": f"{HEAD}spec: {{rule: least-cost}}\n",
}
IN_CONFIG = [
    ("envoy: {listen: {port: 8080}}", 'line 3: envoy.listen: has port; write listen: "0.0.0.0:8080"'),
    ("admin: {adress: x}", "line 3: admin: unknown field `adress`; did you mean `address`?"),
    ("admin: 9090", "line 3: admin: expected a mapping, found a whole number; write its fields: address"),
    ("listen: 127.0.0.1", "line 3: listen.address: '127.0.0.1' is not ip:port"),
    ("edsFile: x", "line 3: unknown field `edsFile`; put it under `envoy`"),
    ("workers: 0", "line 3: workers: expected a whole number >= 1, found 0"),
    (
        "envoy:\n\tlisten: x",
        "line 4, column 1: not YAML: while scanning for the next token found character that cannot start any token; indent with spaces",
    ),
    ("endpointsFile: e.yaml", "`endpointsFile` stands twice, in lines 1 and 3; write it once"),
    ("envoy: {listen: a, listen: b}", "`listen` stands twice, in line 3; write it once"),
    ("---\nworkers: 2", "found another document, line 3; remove the line `---`"),
    ("drain: 30", "line 3: unknown field `drain`; did you mean `drainSeconds`?"),
    ("logLevel: debug", "line 3: unknown field `logLevel`; did you mean `log`?"),
    ("workers: 2.5", "line 3: workers: expected a whole number, found 2.5"),
    (" workers: 2", "; indent the fields of one mapping equally, "),
    ("dialect: isto", "line 3: dialect: found 'isto'; values are agentgateway, "),
    ("admin: 0.0.0.0:9002", "admin.address: 0.0.0.0:9002 is taken by listen.address; choose another port"),
    ("listen: {port: 1}", "line 3: listen: unknown field `port`; fields are address, transport, "),
    (
        "blockedPaths: [a]",
        "line 3: blockedPaths[0]: expected a text of another form, found a; write a path, such as /metrics",
    ),
    ("admin: {hosts: [b-]}", "found b-; write lower-case letters and digits, with dashes or dots between"),
]
MISTAKES = [
    *(("config.yaml", GOOD["config.yaml"] + line, message) for line, message in IN_CONFIG),
    (
        "config.yaml",
        "- endpointsFile: e.yaml",
        "expected a mapping, found a list; write its fields, without a dash before them: ",
    ),
    ("config.yaml", "", "endpointsFile: is missing; name the file that lists the model servers"),
    (
        "config.yaml",
        "endpointsFile: away.yaml",
        "away.yaml: No such file or directory; create it, or correct the path",
    ),
    (
        "e.yaml",
        "endpoints: []",
        "endpoints: the list is empty, so every request would get 503; write one as {name: a, ",
    ),
    (
        "e.yaml",
        "endpoints: {name: a, address: x}",
        "line 1: endpoints: expected a list, found a mapping; write a list, such as - {name: ..., ",
    ),
    (
        "e.yaml",
        "endpoints:\n  - {name: a}",
        "line 2: endpoints[0]: there is no `address`; it needs name, address",
    ),
    (
        "e.yaml",
        "endpoints:\n  - {name: a, address: http://a}",
        "line 2: endpoints[0].address: 'http://a' is a URL; write ip:port",
    ),
    (
        "e.yaml",
        GOOD["e.yaml"] + "  - {name: a, address: 10.0.0.2:80}",
        "line 3: endpoints[1].name: a is already the name of endpoints[0]",
    ),
    ("e.yaml", "endpoints: [{name: a, address: '10.0.0.1:80', labels: [x]}]", "before them: NAME: VALUE"),
    ("p.yaml", f"{HEAD}rule: least-cost", "line 4: unknown field `rule`; put it under `spec`"),
]


@pytest.mark.parametrize(
    ("name", "text", "message"), MISTAKES, ids=[f"{each[0]}-{n}" for n, each in enumerate(MISTAKES)]
)
def test_a_mistake_in_a_file_says_where_and_what_to_write(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for each, content in {**GOOD, name: text}.items():
        (tmp_path / each).write_text(content)
    assert main(["check", "--config", str(tmp_path / "config.yaml")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert str(tmp_path / name) in printed.err or "away" in message
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chek --config x", "there is no command chek; did you mean check?"),
        ("check --confg x", "there is no option --confg; did you mean --config?"),
        ("check --config=x --verbos2", "there is no option --verbos2; did you mean --verbose?"),
        ("check -c x", "there is no option -c; there are -h, --help, --config"),
        ("check", "the following arguments are required: --config"),
        ("check x.yaml", "write --config x.yaml"),
        ("explain --window 0", "argument --window: 0: write a number above 0"),
        ("up --sever a", "there is no option --sever; did you mean --server?"),
        ("explain --window 2.5", "argument --window: 2.5: write a whole number"),
        ("explain --window 5m", "argument --window: 5m: write a number, without a unit"),
        ("up --server a --port high", "argument --port: high: write PORT or IP:PORT"),
        ("up 10.0.0.1:8000", "write --server 10.0.0.1:8000"),
        ("record x --for inf", "argument --for: inf: write a number above 0"),
        ("replay x --load nan", "argument --load: nan: write a number above 0"),
        ("replay x --servers -1", "argument --servers: -1: write a number above 0"),
    ],
)
def test_a_misspelt_word_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def test_a_path_that_is_closed_to_this_user_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name, more in (
        ("", "config.yaml", ""),
        ("endpointsFile: ", "e.yaml", ""),
        ("policyFile: ", "p.yaml", ""),
        ("listen.tls.certFile: ", "c.pem", "listen: {tls: {certFile: c.pem, keyFile: c.pem}}"),
        ("envoy.tls.certFile: ", "c.pem", "envoy: {tls: {certFile: c.pem, keyFile: c.pem}}"),
        ("models.apiKeyFile: ", "key", "models: {apiKeyFile: key}"),
    ):
        for each, content in {name: "", **GOOD, "config.yaml": GOOD["config.yaml"] + more}.items():
            (tmp_path / each).write_text(content)
        with monkeypatch.context() as patch:
            for method in ("open", "stat"):
                patch.setattr(Path, method, closed(name, getattr(Path, method)))
            assert main(["check", "--config", str(tmp_path / "config.yaml")]) == 2
        message = f"{where}{tmp_path / name}: Permission denied; give this user access, or name another path"
        assert capsys.readouterr() == ("", f"epp: {message}\n")


def closed(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def method(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *args, **options)

    return method


def test_what_up_cannot_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    place = f"--port {free_port()} --page {free_port()}"
    for words, message in (
        ("--port 192.0.2.1:80", "port 192.0.2.1:80: Cannot assign requested address; name another port, on"),
        (f"{place} --write /proc/x", "--write: cannot write in /proc/x: No such file or directory; create "),
        (f"{place} --tls a.pem b.pem", "a.pem: No such file or directory; create it, or correct "),
        ("--port 1 --page 1", "--page 127.0.0.1:1: is the address of --port too; name another port"),
        (f"{place} --server a..b", "--server a..b:8000: "),
    ):
        assert main(["up", "--server", "127.0.0.1", *words.split()]) == 2
        assert message in capsys.readouterr().err
    with socket.create_server(("0.0.0.0", 0)) as taken:
        assert main(["up", "--server", "a", "--port", f"[::]:{taken.getsockname()[1]}"]) == 2
        assert "Address already in use; name another port" in capsys.readouterr().err


def test_all_words_complete_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    assert 'local words="up serve check ' in script
    assert "check) words='--help --config --verbose --json' ;;" in script
    assert "--worker" not in script, "the picker's own arguments are in no help"
    assert "--hub" not in script
