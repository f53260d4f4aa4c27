"""The files that the configuration names: read at start, and watched from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.config.kubernetes import Kubernetes
from epp.config.settings import Config, load_config
from epp.errors import ConfigError
from epp.inputs import load_inputs

HEAD = "apiVersion: prefix-gateway.dev/v1alpha1, kind: PrefixRoutingPolicy, metadata: {name: p}"


@pytest.mark.parametrize("field", ["endpointsFile", "policyFile"])
def test_a_file_that_is_not_there_is_told_with_its_field_and_where_it_was_looked_for(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endpoints.yaml").write_text("endpoints: []")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"endpointsFile": "endpoints.yaml", field: "away.yaml"}))
    with pytest.raises(
        ConfigError, match=f"{field}: away.yaml: No such file or directory, looked for in {tmp_path}"
    ):
        load_inputs(load_config(file))


def test_the_policy_file_beside_a_cluster_is_the_default_and_not_in_dry_run(tmp_path: Path) -> None:
    policy, kubeconfig = tmp_path / "policy.yaml", tmp_path / "kubeconfig"
    policy.write_text(f"{{{HEAD}, spec: {{mode: DryRun}}}}")
    kubeconfig.write_text("{current-context: c, contexts: [{name: c, context: {namespace: n}}]}")
    config = Config(policy_file=str(policy), kubernetes=Kubernetes(pool="p", kubeconfig=str(kubeconfig)))
    with pytest.raises(ConfigError, match=r"spec\.mode: beside `kubernetes`"):
        load_inputs(config)
