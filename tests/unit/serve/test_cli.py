"""The `epp` command: what each subcommand prints and writes, and its exit status."""

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.config.settings import load_config
from epp.serve.cli import main
from epp.serve.envoy.files import bootstrap

KUBECONFIG = "{current-context: c, contexts: [{name: c, context: {namespace: models}}]}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "e.yaml").write_text('endpoints: [{name: a, address: "10.0.0.1:8000"}]')
    path = tmp_path / "config.yaml"
    path.write_text(f"{{endpointsFile: {tmp_path}/e.yaml, envoy: {{edsFile: {tmp_path}/eds.json}}}}")
    return path


def test_a_check_prints_one_line_if_all_is_well(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(config)]) == 0
    text = "OK: 1 endpoint, rule least-cost, picker on 127.0.0.1:9002, gateway envoy\n"
    assert capsys.readouterr() == (text, "")


@pytest.mark.parametrize("form", ["--verbose", "--json"])
def test_a_check_can_print_the_configuration_with_every_default(
    form: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(config), form]) == 0
    printed = capsys.readouterr()
    shown = (msgspec.json if form == "--json" else msgspec.yaml).decode(printed.out)
    assert shown["config"]["drainSeconds"] == 30.0
    assert shown["policy"]["spec"]["rule"] == DEFAULT_POLICY.spec.rule
    assert shown["endpoints"] == [{"name": "a", "address": "10.0.0.1:8000", "model": ""}]
    assert printed.err == ""


def test_a_check_needs_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig, path = tmp_path / "kubeconfig", tmp_path / "config.yaml"
    kubeconfig.write_text(KUBECONFIG)
    path.write_text(f"kubernetes: {{pool: vllm, kubeconfig: {kubeconfig}}}")
    assert main(["check", "--config", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("OK: endpoints from the cluster, ")
    assert printed.err == ""


@pytest.mark.parametrize("command", ["check", "envoy-config", "serve"])
def test_an_unusable_configuration_ends_the_command_with_its_fault(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{endpointsFile: e, worker: 2}")
    assert main([command, "--config", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"epp: {path}: ")
    assert "worker" in printed.err


def test_the_bootstrap_can_be_a_file_and_the_files_it_names_exist(config: Path, tmp_path: Path) -> None:
    output, endpoints = tmp_path / "run" / "envoy.yaml", tmp_path / "eds.json"
    assert main(["envoy-config", "--config", str(config), "--output", str(output)]) == 0
    assert output.read_text() == bootstrap(load_config(config))
    assert json.loads(endpoints.read_text())["resources"][0]["endpoints"] == [{"lb_endpoints": []}]
    endpoints.write_text("of the picker")
    assert main(["envoy-config", "--config", str(config)]) == 0
    assert endpoints.read_text() == "of the picker"


def test_the_error_for_an_unwritable_output_file_names_the_flag(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["envoy-config", "--config", str(config), "--output", str(config / "envoy.yaml")]) == 2
    assert "--output" in capsys.readouterr().err


def test_without_a_simulator_replay_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "epp.tools.replay.command", None)
    assert main(["replay", "recording"]) == 2
    assert "this installation has no simulator" in capsys.readouterr().err


def test_a_command_ends_quietly_when_its_reader_has_left(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["envoy-config", "--config", str(config)]) == 0
    assert capfd.readouterr().err == ""
