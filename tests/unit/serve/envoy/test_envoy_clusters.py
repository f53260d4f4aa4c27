"""The clusters of the bootstrap: settings without which Envoy's defaults would fail unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.serve.envoy import clusters
from tests.unit.serve.envoy.configs import a_config

HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def test_a_worker_that_hangs_is_left_out_within_3_5_s() -> None:
    (check,) = clusters.picker(a_config())["health_checks"]
    times = {name: float(str(value).rstrip("s")) for name, value in check.items() if str(value).endswith("s")}
    assert check["unhealthy_threshold"] == 2
    for first in ("interval", "no_traffic_interval", "no_traffic_healthy_interval"):
        assert times[first] + times["timeout"] + times["unhealthy_edge_interval"] + times["timeout"] < 3.5


@pytest.mark.parametrize("eds_file", ["eds.json", "run/eds.json", "/run/eds.json"])
def test_path_of_the_endpoints_file_is_absolute_and_its_folder_is_watched(eds_file: str) -> None:
    config = clusters.model_servers(a_config(eds_file=eds_file))["eds_cluster_config"]["eds_config"]
    source = config["path_config_source"]
    assert source["path"] == str(Path.cwd() / eds_file)
    assert source["watched_directory"] == {"path": str((Path.cwd() / eds_file).parent)}


def test_the_picker_speaks_http2_and_the_model_servers_http1() -> None:
    picker = clusters.picker(a_config())["typed_extension_protocol_options"][HTTP]
    servers = clusters.model_servers(a_config())["typed_extension_protocol_options"][HTTP]
    assert list(picker["explicit_http_config"]) == ["http2_protocol_options"]
    assert list(servers["explicit_http_config"]) == ["http_protocol_options"]
    idle = servers["common_http_protocol_options"]["idle_timeout"]
    assert float(idle.rstrip("s")) < 5, "vLLM's server closes an idle connection after 5 s"


def test_no_cluster_refuses_more_than_a_thousand_requests() -> None:
    for cluster in (clusters.picker(a_config()), clusters.model_servers(a_config())):
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert min(limits.values()) >= 1_000
        assert limits["max_requests"] == limits["max_pending_requests"] == 100_000
