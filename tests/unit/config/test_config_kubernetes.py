"""The `kubernetes` section: the names that follow from it, and the messages for mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.kubernetes import Kubernetes
from epp.config.settings import load_config


def test_a_cluster_needs_only_the_name_of_its_pool(file: Path) -> None:
    file.write_text("kubernetes: {pool: vllm-llama}")
    cluster = load_config(file).kubernetes
    assert cluster is not None
    assert (cluster.pool, cluster.namespace, cluster.kubeconfig) == ("vllm-llama", "", "")
    assert cluster.address_family == "Primary"


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("{kubernetes: {namespace: n}}", "kubernetes.pool", "pools"),
        ("{kubernetes: {pool: p, pools: [q]}}", "kubernetes.pool", "either"),
        ("{kubernetes: {pools: [p, q, p]}}", "kubernetes.pools", "twice"),
        ("{kubernetes: {pools: [p, Q]}}", "kubernetes.pools", "regex"),
        (
            "{kubernetes: {pools: [p, q], selector: {a: b}, targetPorts: [1]}}",
            "kubernetes.selector",
            "kubernetes.pool",
        ),
        ("{kubernetes: {pool: Vllm}}", "kubernetes.pool", "regex"),
        ("{kubernetes: {pool: p, status: {events: false}}}", "kubernetes", "`status` was removed"),
        ("{kubernetes: {pool: p, selector: {app: vllm}}}", "kubernetes.selector", "targetPorts"),
        ("{kubernetes: {pool: p, targetPorts: [8000]}}", "kubernetes.selector", "targetPorts"),
        ("{kubernetes: {pool: p, targetPorts: [0]}}", "kubernetes.targetPorts", ">= 1"),
        ("{kubernetes: {pool: p, selector: {'a,b': c}}}", "kubernetes.selector", "regex"),
        (
            "{kubernetes: {pool: p, rewrites: [gateway.networking.k8s.io]}}",
            "kubernetes.rewrites",
            "values are",
        ),
    ],
)
def test_a_mistake_is_refused_with_the_file_the_field_and_the_reason(
    file: Path, text: str, field: str, why: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert field in message
    assert why in message


def test_a_selector_and_target_ports_may_be_given_in_the_configuration(file: Path) -> None:
    file.write_text("kubernetes: {pool: p, selector: {app: vllm}, targetPorts: [8000, 8001]}")
    cluster = load_config(file).kubernetes
    assert cluster is not None
    assert (cluster.names, cluster.target_ports) == (("p",), (8000, 8001))


def test_the_order_of_pools_is_kept() -> None:
    cluster = Kubernetes(pools=("b", "a"))
    cluster.validate()
    assert cluster.names == ("b", "a")
