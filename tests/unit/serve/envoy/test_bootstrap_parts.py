"""The parts of the bootstrap: what the settings change, and settings without which Envoy's defaults would
fail unnoticed. Tests of the real Envoy (`tests/integration`) show what it does with the others.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.base.types import SERVER_HEADERS
from epp.config.sections import EnvoyTracing
from epp.config.settings import Config, load_config
from tests.harness.envoy import bootstrap_document, cluster, connection_manager
from tests.unit.serve.envoy.configs import a_config

EXT_PROC = "envoy.filters.http.ext_proc"
LAST = "envoy.filters.http.router"
HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def manager(config: Config) -> dict[str, Any]:
    return connection_manager(bootstrap_document(config))


def clusters(**settings: Any) -> list[dict[str, Any]]:
    """Return the clusters of the picker and of the model servers."""
    document = bootstrap_document(a_config(**settings))
    return [cluster(document, name) for name in ("picker", "model-servers")]


def filters(config: Config) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in manager(config)["http_filters"]}


def test_an_address_of_all_families_takes_ipv4_too() -> None:
    everywhere = a_config(admin="[::]:9901", status="[::]:9902").envoy
    for listen, compatible in (("[::]:8080", True), ("[::1]:8080", None)):
        envoy = msgspec.structs.replace(everywhere, listen=listen)
        document = bootstrap_document(msgspec.structs.replace(a_config(), envoy=envoy))
        places = (document["admin"], *document["static_resources"]["listeners"])
        asked = [each["address"]["socket_address"].get("ipv4_compat") for each in places]
        assert asked == [True, compatible, True]


def test_headers_that_servers_obey_are_removed_before_any_filter_runs() -> None:
    (mutation,) = manager(a_config())["early_header_mutation_extensions"]
    removed = {each["remove"] for each in mutation["typed_config"]["mutations"]}
    assert removed == {"x-gateway-destination-endpoint", *SERVER_HEADERS}


def test_filters_of_the_operator_come_first_and_the_router_last() -> None:
    config = a_config(extra_http_filters=({"name": "keys"},))
    assert list(filters(config)) == ["keys", EXT_PROC, "envoy.filters.http.custom_response", LAST]
    (websocket,) = manager(config)["upgrade_configs"]
    assert [each["name"] for each in websocket["filters"]] == ["keys", LAST], "their bodies never end"


@pytest.mark.parametrize("fail_open", [True, False])
def test_the_settings_for_an_unreachable_picker_are_passed_to_ext_proc(fail_open: bool) -> None:  # noqa: FBT001 - a case
    config = a_config(fail_open=fail_open, message_timeout_seconds=0.5, max_message_timeout_seconds=7)
    ext_proc = filters(config)[EXT_PROC]["typed_config"]
    assert ext_proc["failure_mode_allow"] is fail_open
    assert (ext_proc["message_timeout"], ext_proc["max_message_timeout"]) == ("0.5s", "7s")


def test_cut_answers_are_always_reported() -> None:
    names = [log["name"] for log in manager(a_config(access_log=False))["access_log"]]
    assert names == ["envoy.access_loggers.http_grpc"]


def test_spans_are_made_only_if_a_collector_is_named() -> None:
    assert "tracing" not in manager(a_config())
    traced = manager(a_config(tracing=EnvoyTracing(collector="c:4317", sample_percent=0.5)))
    sampler = traced["tracing"]["provider"]["typed_config"]["sampler"]["typed_config"]["wrapped_sampler"]
    assert sampler["typed_config"]["sampling_percentage"] == {"numerator": 5_000, "denominator": "MILLION"}


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1s"), (0.0, "0s"), (0.25, "0.25s"), (3600.0, "3600s"), (1e-6, "0.000001s"), (1 / 3, "0.333333s")],
)
def test_a_duration_has_no_exponent_and_no_zeros_at_its_end(number: float, text: str) -> None:
    assert manager(a_config(request_timeout_seconds=number))["request_timeout"] == text


def test_a_worker_that_hangs_is_left_out_within_3_5_s() -> None:
    (check,) = clusters()[0]["health_checks"]
    times = {name: float(str(value).rstrip("s")) for name, value in check.items() if str(value).endswith("s")}
    assert check["unhealthy_threshold"] == 2
    for first in ("interval", "no_traffic_interval", "no_traffic_healthy_interval"):
        assert times[first] + times["timeout"] + times["unhealthy_edge_interval"] + times["timeout"] < 3.5


@pytest.mark.parametrize("eds_file", ["eds.json", "run/eds.json", "/run/eds.json"])
def test_path_of_the_endpoints_file_is_absolute_and_its_folder_is_watched(
    tmp_path: Path, eds_file: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{{endpointsFile: e, envoy: {{edsFile: {eds_file}}}}}")
    servers = cluster(bootstrap_document(load_config(file)), "model-servers")
    source = servers["eds_cluster_config"]["eds_config"]["path_config_source"]
    assert source["path"] == str(tmp_path / eds_file)
    assert source["watched_directory"] == {"path": str((tmp_path / eds_file).parent)}


def test_the_picker_speaks_http2_and_the_model_servers_http1() -> None:
    picker, servers = (each["typed_extension_protocol_options"][HTTP] for each in clusters())
    assert list(picker["explicit_http_config"]) == ["http2_protocol_options"]
    assert list(servers["explicit_http_config"]) == ["http_protocol_options"]
    idle = servers["common_http_protocol_options"]["idle_timeout"]
    assert float(idle.rstrip("s")) < 5, "vLLM's server closes an idle connection after 5 s"


def test_no_cluster_refuses_more_than_a_thousand_requests() -> None:
    for each in clusters():
        (limits,) = each["circuit_breakers"]["thresholds"]
        assert min(limits.values()) >= 1_000
        assert limits["max_requests"] == limits["max_pending_requests"] == 100_000
