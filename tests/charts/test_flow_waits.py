"""The messages of `epp check` about a policy whose requests wait, with the configuration that the chart
writes for each gateway.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from epp.config.policy import load_policy
from epp.serve.preflight import contradictions
from tests.charts.rendering import GATEWAY, Helm, behind, of_kind
from tests.charts.test_configuration import config_of

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster


def waiting(provider: str, **envoy: Any) -> dict[str, Any]:
    return behind(provider, route=True) | {"config": {"envoy": envoy}}


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        ({}, ""),
        ({"config": {"envoy": {"maxMessageTimeoutSeconds": 5}}}, "with envoy a request .* after 4.5 s"),
        (waiting(""), "an unknown gateway .* no request with a buffered body waits"),
        (waiting("", maxMessageTimeoutSeconds=60), ""),
        (waiting("envoy-gateway"), "after 0.9 s, nine tenths of envoy.messageTimeoutSeconds"),
        (waiting("envoy-gateway", messageTimeoutSeconds=40), ""),
        (waiting("istio"), ""),
        (waiting("ai-gateway"), ""),
        (waiting("agentgateway"), ""),
        (waiting("gke"), ""),
        (waiting("nginx"), "nginx does not wait for the body"),
    ],
)
def test_a_wait_that_is_longer_than_the_gateway_allows_is_named(
    helm: Helm, tmp_path: Path, values: dict[str, Any], remark: str
) -> None:
    objects = helm.render(GATEWAY, {**values, "policy": {"flow": {"mode": "Hold"}}})
    config = config_of(objects, tmp_path)
    written = of_kind(objects, "ConfigMap", "gateway-prefix-gateway-policy")["data"]["policy.yaml"]
    said = contradictions(config, load_policy(written.encode(), source="policy.yaml"))
    assert len(said) == bool(remark), said
    assert re.search(remark, "".join(said))
