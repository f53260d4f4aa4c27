"""The listener for clients: what reaches the picker, what clients cannot send, what the settings change."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from epp.base.types import SERVER_HEADERS
from epp.config.envoy import EnvoyTracing
from epp.config.settings import Config
from epp.config.tls import Tls
from epp.serve.envoy.client_listener import ACCESS_LOG_FIELDS, EXT_PROC, gateway
from epp.serve.envoy.names import DESTINATION
from tests.unit.serve.envoy.configs import a_config

LAST = "envoy.filters.http.router"


def manager(config: Config) -> dict[str, Any]:
    (chain,) = gateway(config)["filter_chains"]
    (http,) = chain["filters"]
    settings: dict[str, Any] = http["typed_config"]
    return settings


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
    assert removed == {DESTINATION, *SERVER_HEADERS}


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


@pytest.mark.parametrize(
    ("settings", "codec"),
    [
        ({}, "AUTO"),
        ({"http2_cleartext": False}, "HTTP1"),
        ({"http2_cleartext": False, "tls": Tls(cert_file="c", key_file="k")}, "AUTO"),
    ],
)
def test_http2_without_tls_can_be_turned_off(settings: dict[str, Any], codec: str) -> None:
    assert manager(a_config(**settings))["codec_type"] == codec


@pytest.mark.parametrize("fail_open", [True, False])
def test_the_settings_for_an_unreachable_picker_are_passed_to_ext_proc(fail_open: bool) -> None:  # noqa: FBT001 - a case
    config = a_config(fail_open=fail_open, message_timeout_seconds=0.5, max_message_timeout_seconds=7)
    ext_proc = filters(config)[EXT_PROC]["typed_config"]
    assert ext_proc["failure_mode_allow"] is fail_open
    assert (ext_proc["message_timeout"], ext_proc["max_message_timeout"]) == ("0.5s", "7s")


def test_cut_answers_are_always_reported() -> None:
    names = [log["name"] for log in manager(a_config(access_log=False))["access_log"]]
    assert names == ["envoy.access_loggers.http_grpc"]
    grpc, line = manager(a_config())["access_log"]
    assert grpc["name"] == names[0]
    assert line["typed_config"]["log_format"]["json_format"] == ACCESS_LOG_FIELDS


def test_spans_are_made_only_if_a_collector_is_named() -> None:
    assert "tracing" not in manager(a_config())
    traced = manager(a_config(tracing=EnvoyTracing(collector="c:4317", sample_percent=0.5)))
    sampler = traced["tracing"]["provider"]["typed_config"]["sampler"]["typed_config"]["wrapped_sampler"]
    assert sampler["typed_config"]["sampling_percentage"] == {"numerator": 5_000, "denominator": "MILLION"}


def test_bodies_are_bounded_by_the_route_and_answers_are_not() -> None:
    config = a_config(max_body_bytes=70_000)
    assert routes(config)[-1]["request_body_buffer_limit"] == 70_000
    assert "per_connection_buffer_limit_bytes" not in gateway(config)
