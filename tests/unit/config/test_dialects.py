"""The profile of each gateway: its settings, and the conflicts that `epp check` reports."""

from pathlib import Path
from typing import get_args

import pytest

from epp.base.errors import ConfigError
from epp.config.dialects import DIALECTS, DialectName
from epp.config.settings import load_config
from epp.serve.cli import main


def config(folder: Path, text: str = "") -> Path:
    (folder / "endpoints.yaml").write_text('endpoints: [{name: a, address: "10.0.0.1:8000"}]')
    policy = (
        "{apiVersion: prefix-gateway.dev/v1alpha1, kind: PrefixRoutingPolicy, metadata: {name: p}, spec: {}}"
    )
    (folder / "policy.yaml").write_text(policy)
    file = folder / "epp.yaml"
    file.write_text(f"endpointsFile: {folder}/endpoints.yaml\npolicyFile: {folder}/policy.yaml\n{text}")
    return file


def remarks(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", "--config", str(file)]) == 0
    return capsys.readouterr().err


def test_every_name_has_a_profile() -> None:
    assert {"auto", *DIALECTS} == set(get_args(DialectName))


def test_the_dialect_is_envoy_if_the_picker_writes_endpoints_for_envoy(tmp_path: Path) -> None:
    assert load_config(config(tmp_path, "envoy: {edsFile: eds.json}")).caller is DIALECTS["envoy"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("dialect: istio\nenvoy: {edsFile: /tmp/eds.json}", "envoy.edsFile"),
        ("dialect: traefik", "dialect"),
    ],
)
def test_settings_that_contradict_the_dialect_are_refused(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(config(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dialect: nginx", "does not show the picker the path"),
        ("dialect: gke\nworkers: 2", "InferencePool names one port"),
    ],
)
def test_the_check_says_how_other_settings_work_with_the_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert message in remarks(config(tmp_path, text), capsys)


@pytest.mark.parametrize("name", ["envoy", "envoy-gateway", "istio", "agentgateway"])
def test_the_check_prints_no_remark_if_only_the_dialect_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert remarks(config(tmp_path, f"dialect: {name}"), capsys) == ""
