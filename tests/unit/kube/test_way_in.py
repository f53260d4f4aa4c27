"""The message for a configuration that has no way into a cluster. It comes before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from epp.cli import main
from epp.config.kubernetes import Kubernetes
from epp.config.settings import Config, load_config
from epp.errors import ConfigError
from epp.kube.api import namespace_of, require
from epp.serve.inputs import load_inputs

KUBECONFIG = """
current-context: here
contexts:
  - {name: there, context: {cluster: c, user: u, namespace: elsewhere}}
  - {name: here, context: {cluster: c, user: u, namespace: models}}
"""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "kubernetes" else found(name, *a)
    )
    with pytest.raises(ConfigError, match=r"pip install 'prefix-gateway\[kubernetes\]'"):
        require(Kubernetes(pool="p", kubeconfig=str(kubeconfig)))


def test_outside_of_a_pod_it_asks_for_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: is missing"):
        require(Kubernetes(pool="p"))


def test_a_kubeconfig_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: /nowhere: no such file"):
        require(Kubernetes(pool="p", kubeconfig="/nowhere"))


def test_the_namespace_is_that_of_the_current_context(kubeconfig: Path) -> None:
    assert namespace_of(Kubernetes(pool="p", kubeconfig=str(kubeconfig))) == "models"
    assert namespace_of(Kubernetes(pool="p", kubeconfig=str(kubeconfig), namespace="mine")) == "mine"


@pytest.mark.parametrize("text", ["[", "[]", "{contexts: [{}]}"])
def test_a_kubeconfig_that_is_none_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"kubernetes\.namespace: cannot find the namespace of this pod, so please set it"
    ):
        namespace_of(Kubernetes(pool="p", kubeconfig=str(path)))


def test_the_policy_file_beside_a_cluster_is_the_default_and_not_in_dry_run(
    tmp_path: Path, kubeconfig: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "{apiVersion: prefix-gateway.dev/v1alpha1, kind: PrefixRoutingPolicy, metadata: {name: p}, spec: {mode: DryRun}}"
    )
    config = Config(policy_file=str(policy), kubernetes=Kubernetes(pool="p", kubeconfig=str(kubeconfig)))
    with pytest.raises(ConfigError, match=r"spec\.mode: beside `kubernetes`"):
        load_inputs(config)


def test_a_check_needs_no_cluster(
    tmp_path: Path, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"kubernetes: {{pool: vllm, kubeconfig: {kubeconfig}}}")
    assert main(["check", "--config", str(path)]) == 0
    printed = capsys.readouterr()
    assert "pool: vllm" in printed.out
    assert printed.err == ""
    assert load_config(path).kubernetes is not None
