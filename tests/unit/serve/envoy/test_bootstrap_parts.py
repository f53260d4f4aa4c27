"""The parts of the bootstrap: what reaches the picker, what clients cannot send, what the settings change,
and settings without which Envoy's defaults would fail unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.base.errors import DETAILS, BlockedPathError, BodyTooLargeError
from epp.base.types import SERVER_HEADERS
from epp.config.envoy import EnvoyTracing
from epp.config.settings import Config
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


def routes(config: Config) -> list[dict[str, Any]]:
    (host,) = manager(config)["route_config"]["virtual_hosts"]
    found: list[dict[str, Any]] = host["routes"]
    return found


def test_the_picker_is_asked_only_by_the_route_to_the_model_servers() -> None:
    config = a_config()
    assert filters(config)[EXT_PROC]["disabled"]
    *blocked, last = routes(config)
    assert EXT_PROC in last["typed_per_filter_config"]
    assert all("typed_per_filter_config" not in route for route in blocked)


def test_an_address_of_all_families_takes_ipv4_too() -> None:
    document = bootstrap_document(a_config(admin="[::]:9901", status="[::1]:9902"))
    gateway, status = document["static_resources"]["listeners"]
    asked = [
        each["address"]["socket_address"].get("ipv4_compat") for each in (document["admin"], gateway, status)
    ]
    assert asked == [True, None, None]


def test_blocked_paths_in_any_case_come_before_all_other_routes() -> None:
    config = msgspec.structs.replace(
        a_config(), blocked_paths=("/metrics", "/sleep"), allowed_paths=("/sleep",)
    )
    first, _, last = routes(config)
    assert first["match"] == {"prefix": "/metrics", "case_sensitive": False}
    assert first["direct_response"] == {"status": 404}
    assert last["match"] == {"prefix": "/"}


def test_headers_that_servers_obey_are_removed_before_any_filter_runs() -> None:
    (mutation,) = manager(a_config())["early_header_mutation_extensions"]
    removed = {each["remove"] for each in mutation["typed_config"]["mutations"]}
    assert removed == {"x-gateway-destination-endpoint", *SERVER_HEADERS}


def test_filters_of_the_operator_come_first_and_the_router_last() -> None:
    config = a_config(extra_http_filters=({"name": "keys"},))
    assert list(filters(config)) == ["keys", EXT_PROC, "envoy.filters.http.custom_response", LAST]
    (websocket,) = manager(config)["upgrade_configs"]
    assert [each["name"] for each in websocket["filters"]] == ["keys", LAST], "their bodies never end"


@pytest.mark.parametrize(
    ("offered", "ignored"),
    [(("TLS/1.2", "h2c", "web", "websockets", "x-websocket"), True), (("websocket", "WebSocket"), False)],
)
def test_every_upgrade_but_that_to_a_websocket_is_ignored(offered: tuple[str, ...], *, ignored: bool) -> None:
    (matcher,) = manager(a_config())["http_protocol_options"]["ignore_http_11_upgrade"]
    for each in offered:
        assert bool(re.fullmatch(matcher["safe_regex"]["regex"], each)) is ignored, each


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


def test_bodies_are_bounded_by_the_route_and_answers_are_not() -> None:
    config = a_config(max_body_bytes=70_000)
    assert routes(config)[-1]["request_body_buffer_limit"] == 70_000
    listener = bootstrap_document(config)["static_resources"]["listeners"][0]
    assert "per_connection_buffer_limit_bytes" not in listener


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
def test_path_of_the_endpoints_file_is_absolute_and_its_folder_is_watched(eds_file: str) -> None:
    _, servers = clusters(eds_file=eds_file)
    source = servers["eds_cluster_config"]["eds_config"]["path_config_source"]
    assert source["path"] == str(Path.cwd() / eds_file)
    assert source["watched_directory"] == {"path": str((Path.cwd() / eds_file).parent)}


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


MAPPERS: list[Mapping[str, Any]] = manager(a_config())["local_reply_config"]["mappers"]
"""The errors that Envoy makes itself, as clients of OpenAI's and of Anthropic's API read them."""


def status_of(mapper: Mapping[str, Any]) -> tuple[str, int]:
    comparison = mapper["filter"]["status_code_filter"]["comparison"]
    return comparison["op"], comparison["value"]["default_value"]


def errors() -> dict[int, Mapping[str, Any]]:
    """Return the error object of each status that has one of its own."""
    named = [mapper for mapper in MAPPERS if "status_code_filter" in mapper["filter"]]
    return {
        status: mapper["body_format_override"]["json_format"]["error"]
        for mapper in named
        for op, status in [status_of(mapper)]
        if op == "EQ"
    }


def test_the_first_rule_passes_the_pickers_own_answers_unchanged() -> None:
    first = MAPPERS[0]
    expression = first["filter"]["extension_filter"]["typed_config"]["expression"]
    assert expression == f"response.code_details.startsWith('{DETAILS}')"
    assert list(first) == ["filter"], "nothing is replaced"


def test_every_other_rule_writes_json_with_the_fields_that_clients_read() -> None:
    assert status_of(MAPPERS[-1]) == ("GE", 400), "any other error"
    for mapper in MAPPERS[1:]:
        body = mapper["body_format_override"]
        error = body["json_format"]["error"]
        assert (body["content_type"], body["json_format"]["type"]) == ("application/json", "error")
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] is None
        assert all(error[name] for name in ("message", "type", "code"))


def test_envoy_and_the_picker_give_the_same_code_for_the_same_fault() -> None:
    assert errors()[404]["code"] == BlockedPathError.reason
    assert errors()[413]["code"] == BodyTooLargeError.reason


def test_a_request_without_room_for_our_headers_gets_431() -> None:
    (mapper,) = [each for each in MAPPERS if each.get("status_code")]
    assert mapper["status_code"] == 431
    assert mapper["body_format_override"]["json_format"]["error"] == errors()[431]
