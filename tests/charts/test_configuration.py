"""The programs read and accept the configuration that the charts write."""

import base64
import json
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from epp.base.types import SERVER_HEADERS
from epp.config.settings import Config, load_config
from tests.charts.rendering import (
    GATEWAY,
    Helm,
    Manifest,
    behind,
    of_kind,
    pod_of,
    value_set,
)

pytestmark = pytest.mark.cluster


def config_of(objects: list[Manifest], directory: Path) -> Config:
    text = of_kind(objects, "ConfigMap", "gateway-prefix-gateway-config")["data"]["config.yaml"]
    path = directory / "config.yaml"
    path.write_text(text)
    return load_config(path)


def test_the_shape_decides_what_the_picker_listens_on(helm: Helm, tmp_path: Path) -> None:
    own = config_of(helm.render_set(value_set("gateway-default")), tmp_path)
    assert own.listen.address.startswith("unix:")
    assert own.holds_streams
    behind = config_of(helm.render_set(value_set("gateway-shape")), tmp_path)
    assert behind.listen.tls is not None
    assert not behind.holds_streams, "the gateway fails closed: a dead picker must cut no answer"
    assert behind.kubernetes is not None
    assert not behind.kubernetes.selector, "the InferencePool says which pods"


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ({}, 1),
        ({"provider": "istio"}, 8),
        ({"provider": "nginx"}, 1),
        ({"provider": "ai-gateway"}, 1),
    ],
)
def test_the_provider_decides_how_many_destinations_an_answer_may_name(
    helm: Helm, tmp_path: Path, values: dict[str, Any], most: int
) -> None:
    objects = helm.render(GATEWAY, {"shape": "gateway", "gateway": values})
    config = config_of(objects, tmp_path)
    assert config.caller.max_destinations == most
    assert config.holds_streams == (values.get("provider") != "ai-gateway")


def test_istio_calls_the_picker_over_tls_and_without_its_usual_limits(helm: Helm) -> None:
    rule = of_kind(helm.render_set(value_set("gateway-istio")), "DestinationRule", "gateway-prefix-gateway")
    assert rule["spec"]["host"] == "gateway-prefix-gateway.llm.svc.cluster.local"
    policy = rule["spec"]["trafficPolicy"]
    assert policy["tls"] == {"mode": "SIMPLE", "insecureSkipVerify": True}
    limits = {**policy["connectionPool"]["http"], **policy["connectionPool"]["tcp"]}
    assert limits == dict.fromkeys(("http2MaxRequests", "http1MaxPendingRequests", "maxConnections"), 100_000)


def test_the_key_of_the_charts_certificate_signs_cheaply(helm: Helm, tmp_path: Path) -> None:
    """The key is on the curve P-256: NGINX Gateway Fabric makes a connection for each request."""
    objects = helm.render(GATEWAY, {"shape": "gateway"})
    made = of_kind(objects, "Secret", "gateway-prefix-gateway-picker-tls")["data"]
    files = {name: tmp_path / name for name in ("tls.crt", "tls.key")}
    for name, file in files.items():
        file.write_bytes(base64.b64decode(made[name]))
    assert "BEGIN EC PRIVATE KEY" in files["tls.key"].read_text()
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(files["tls.crt"], files["tls.key"])
    assert made["ca.crt"] == made["tls.crt"]


def role_of(objects: Sequence[Manifest]) -> Mapping[str, Any]:
    """Return the names that the picker's Role allows, by resource."""
    rules = of_kind(objects, "Role", "gateway-prefix-gateway")["rules"]
    return {rule["resources"][0]: rule["resourceNames"] for rule in rules if "resourceNames" in rule}


def test_several_inference_pools_are_followed_with_rights_for_each(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render(
        GATEWAY,
        {"pool": {"name": "ours"}, "inferencePools": [{"name": "llama"}, {"name": "mistral"}]},
    )
    settings = config_of(objects, tmp_path).kubernetes
    assert settings is not None
    assert (settings.pool, settings.names, settings.selector) == ("", ("llama", "mistral"), {})
    assert role_of(objects) == {"inferencepools": ["llama", "mistral"]}
    assert "InferencePool" not in {each["kind"] for each in objects}


def test_in_shape_gateway_the_chart_makes_each_of_several_pools(helm: Helm, tmp_path: Path) -> None:
    pools = [
        {"name": "llama", "selector": {"app": "llama"}},
        {"name": "mistral", "selector": {"app": "mistral"}, "targetPorts": [9000, 9001]},
    ]
    objects = helm.render(GATEWAY, behind("gke") | {"inferencePools": pools})
    made = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "InferencePool"}
    assert {name: spec["selector"]["matchLabels"] for name, spec in made.items()} == {
        "llama": {"app": "llama"},
        "mistral": {"app": "mistral"},
    }
    assert [port["number"] for port in made["llama"]["targetPorts"]] == [8000]
    assert [port["number"] for port in made["mistral"]["targetPorts"]] == [9000, 9001]
    pickers = {spec["endpointPickerRef"]["name"] for spec in made.values()}
    assert pickers == {"gateway-prefix-gateway"}
    settings = config_of(objects, tmp_path).kubernetes
    assert settings is not None
    assert settings.names == tuple(made)
    checks = [each["spec"] for each in objects if each["kind"] == "HealthCheckPolicy"]
    asked = {
        each["targetRef"]["name"]: each["default"]["config"]["httpHealthCheck"]["port"] for each in checks
    }
    assert asked == {"llama": 8000, "mistral": 9000}


@pytest.mark.parametrize("on", [True, False])
def test_behind_envoy_gateway_the_mode_override_is_a_value(helm: Helm, tmp_path: Path, on: bool) -> None:  # noqa: FBT001 - a case
    objects = helm.render(GATEWAY, behind("envoy-gateway", route=True, modeOverride=on))
    (asked,) = of_kind(objects, "EnvoyExtensionPolicy")["spec"]["extProc"]
    assert asked["processingMode"]["allowModeOverride"] is on
    assert config_of(objects, tmp_path).streams.mode_override is on


def test_behind_envoy_gateway_clients_name_no_servers(helm: Helm) -> None:
    policy = of_kind(helm.render_set(value_set("gateway-envoy-gateway")), "ClientTrafficPolicy")
    removed = policy["spec"]["headers"]["earlyRequestHeaders"]["remove"]
    assert removed == ["x-gateway-destination-endpoint", *SERVER_HEADERS]


def test_a_route_removes_headers_that_servers_obey(helm: Helm) -> None:
    """Routes of gateways that use Envoy keep these headers. There a route's filters run after the picker and
    would remove the headers that the picker has set.
    """
    for provider in ("nginx", "istio", "agentgateway", "ai-gateway", "gke", ""):
        objects = helm.render(GATEWAY, behind(provider, route=True))
        (rule,) = of_kind(objects, "HTTPRoute")["spec"]["rules"]
        removed = [f["requestHeaderModifier"]["remove"] for f in rule.get("filters", ())]
        assert removed == ([[*SERVER_HEADERS]] if provider == "nginx" else []), provider


def test_tracing_reaches_picker_and_envoy_and_is_absent_while_off(helm: Helm, tmp_path: Path) -> None:
    off = helm.render(GATEWAY, {"picker": {"extraEnv": None}})
    assert config_of(off, tmp_path).tracing is False
    assert "OTEL_" not in json.dumps(off)
    values = {
        "tracing": {
            "enabled": True,
            "endpoint": "http://otel:4318",
            "protocol": "http/protobuf",
            "sampler": "parentbased_traceidratio",
            "samplerArg": "0.01",
            "headersSecret": {"name": "otel"},
            "envoy": {"collector": "otel:4317", "samplePercent": 1},
        },
        "picker": {"extraEnv": [{"name": "OTEL_SERVICE_NAME", "value": "mine"}]},
    }
    objects = helm.render(GATEWAY, values)
    config = config_of(objects, tmp_path)
    assert config.tracing
    assert config.envoy.tracing is not None
    assert (config.envoy.tracing.collector, config.envoy.tracing.sample_percent) == ("otel:4317", 1)
    pod = pod_of(objects)
    (picker,) = [each for each in pod["initContainers"] if each["name"] == "picker"]
    variables = {each["name"]: each.get("value") for each in picker["env"]}
    assert variables == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
        "OTEL_EXPORTER_OTLP_HEADERS": None,
        "OTEL_SERVICE_NAME": "mine",
    }
    behind = config_of(helm.render(GATEWAY, {**values, "shape": "gateway"}), tmp_path)
    assert behind.tracing
    assert behind.envoy.tracing is None, "the chart does not write the configuration of that Envoy"


def test_every_field_of_the_program_can_be_set(helm: Helm, tmp_path: Path) -> None:
    fields = {"envoy": {"maxBodyBytes": 70000}, "admin": {"hosts": ["a.example"]}, "drainSeconds": 1}
    config = config_of(helm.render(GATEWAY, {"config": fields}), tmp_path)
    assert (config.envoy.max_body_bytes, config.admin.hosts, config.drain_seconds) == (
        70000,
        ("a.example",),
        1,
    )
    assert config.envoy.eds_file == "/run/prefix-gateway/eds.json", "values that were not set stay"


@pytest.mark.parametrize(("limit", "heap"), [("1Gi", 858993459), ("1.5Gi", 1288490188), ("2G", 1600000000)])
def test_envoys_heap_is_four_fifths_of_its_containers_memory(
    helm: Helm, tmp_path: Path, limit: str, heap: int
) -> None:
    objects = helm.render(GATEWAY, {"envoy": {"resources": {"limits": {"memory": limit}}}})
    assert config_of(objects, tmp_path).envoy.max_heap_bytes == heap


def test_the_pickers_port_can_ask_for_client_certificates(helm: Helm, tmp_path: Path) -> None:
    tls = {"secretName": "picker-tls", "requireClientCertificate": True}
    objects = helm.render(GATEWAY, {"shape": "gateway", "gateway": {"tls": tls}})
    listen = config_of(objects, tmp_path).listen.tls
    assert listen is not None
    assert listen.client_ca_file == "/etc/prefix-gateway/tls/ca.crt"
