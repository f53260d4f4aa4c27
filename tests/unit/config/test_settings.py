"""The program's configuration file: its defaults, and the messages for mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.settings import load_config


def test_a_configuration_needs_only_the_endpoints_file(file: Path) -> None:
    file.write_text("endpointsFile: endpoints.yaml")
    config = load_config(file)
    assert config.endpoints_file == str(file.parent / "endpoints.yaml")
    assert config.holds_streams
    assert config.envoy.fail_open
    assert not config.conformance_headers


def test_a_file_with_many_sections_is_read(file: Path) -> None:
    file.write_text(
        """
endpointsFile: endpoints.yaml
policyFile: policy.yaml
workers: 2
holdStreams: false
drainSeconds: 5
listen: {address: "[::1]:9002", tls: {certFile: c.pem, keyFile: k.pem, clientCaFile: ca.pem}}
admin: {address: "127.0.0.1:9090"}
envoy: {listen: "0.0.0.0:8080", edsFile: eds.yaml, failOpen: false, numRetries: 1}
log: {level: debug, format: text}
"""
    )
    config = load_config(file)
    assert config.listen.tls is not None
    assert config.listen.tls.client_ca_file == str(file.parent / "ca.pem")
    assert config.workers == 2
    assert not config.envoy.fail_open


def test_paths_count_from_the_folder_of_the_configuration(file: Path) -> None:
    file.write_text(
        "{endpointsFile: ./e.yaml, policyFile: /p, envoy: {extraHttpFilters: [{name: f, caFile: x}]}}"
    )
    config = load_config(file)
    assert (config.endpoints_file, config.policy_file) == (f"{file.parent}/e.yaml", "/p")
    assert config.envoy.extra_http_filters == ({"name": "f", "caFile": "x"},)


@pytest.mark.parametrize("shape", ["127.0.0.1:{}", "{{address: '127.0.0.1:{}'}}"])
def test_an_address_may_be_a_text_or_a_mapping(file: Path, shape: str) -> None:
    listen, admin, *envoy = (shape.format(port) for port in range(1, 6))
    of_envoy = "listen: {}, admin: {}, status: {}".format(*envoy)
    file.write_text(f"{{endpointsFile: e, listen: {listen}, admin: {admin}, envoy: {{{of_envoy}}}}}")
    config = load_config(file)
    assert (config.listen.address, config.admin.address) == ("127.0.0.1:1", "127.0.0.1:2")
    assert (config.envoy.listen, config.envoy.admin, config.envoy.status) == (
        "127.0.0.1:3",
        "127.0.0.1:4",
        "127.0.0.1:5",
    )


def test_a_cluster_needs_only_a_pool_or_a_selector_with_ports(file: Path) -> None:
    file.write_text("kubernetes: {pool: p, selector: {app: vllm}, targetPorts: [8000, 8001]}")
    cluster = load_config(file).kubernetes
    assert cluster is not None
    assert (cluster.names, cluster.target_ports) == (("p",), (8000, 8001))
    file.write_text("kubernetes: {pools: [b, a]}")
    cluster = load_config(file).kubernetes
    assert cluster is not None
    assert (cluster.names, cluster.namespace, cluster.kubeconfig) == (("b", "a"), "", "")


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("{endpointsFile: e, kubernetes: {pool: p}}", "endpointsFile", "remove one"),
        ("{endpointsFile: e, envoy: {status: '127.0.0.1:9901'}}", "envoy.status", "envoy.admin"),
        ("{endpointsFile: e, listen: {tls: {certFile: c}}}", "listen.tls", "keyFile"),
        ("{endpointsFile: e, listen: {address: 'localhost:9002'}}", "listen.address", "ip:port"),
        ("{endpointsFile: e, listen: {address: 'unix:epp.sock'}}", "listen.address", "absolute"),
        (
            "{endpointsFile: e, listen: {address: 'unix:/s', tls: {certFile: c, keyFile: k}}}",
            "listen.tls",
            "no TLS",
        ),
        ("{endpointsFile: e, blockedPaths: [metrics]}", "blockedPaths", "regex"),
        ("{endpointsFile: e, allowedPaths: [/v1/models]}", "allowedPaths[0]", "not in blockedPaths"),
        ("{endpointsFile: e, blockedPaths: [/sleep], allowedPaths: [/docs]}", "allowedPaths[0]", "/docs"),
        ("{endpointsFile: e, listen: {healthAddress: 9003}}", "listen.healthAddress", "a text"),
        ("{endpointsFile: e, envoy: {listen: '0.0.0.0:0'}}", "envoy.listen", "out of range"),
        ("{endpointsFile: e, envoy: {admin: '::1:9901'}}", "envoy.admin", "brackets"),
        ("{endpointsFile: e, envoy: {failOpen: false}}", "holdStreams", "break off"),
        ("endpointsFile: 2023-99-01", "month", "12"),
        ("{endpointsFile: e, envoy: {tls: {keyFile: k}}}", "envoy.tls", "certFile"),
        (
            "{endpointsFile: e, exactMode: {models: [{hashAlgorithm: auto}]}}",
            "exactMode.models[0]",
            "`hashAlgorithm` was removed",
        ),
        ("{kubernetes: {namespace: n}}", "kubernetes.pool", "pools"),
        ("{kubernetes: {pool: p, pools: [q]}}", "kubernetes.pool", "either"),
        ("{kubernetes: {pools: [p, q, p]}}", "kubernetes.pools", "twice"),
        ("{kubernetes: {pools: [p, Q]}}", "kubernetes.pools", "regex"),
        (
            "{kubernetes: {pools: [p, q], selector: {a: b}, targetPorts: [1]}}",
            "kubernetes.selector",
            "kubernetes.pool",
        ),
        ("{kubernetes: {pool: p, status: {events: false}}}", "kubernetes", "`status` was removed"),
        ("{kubernetes: {pool: p, addressFamily: IPv6}}", "kubernetes", "`addressFamily` was removed"),
        ("{kubernetes: {pool: p, selector: {app: vllm}}}", "kubernetes.selector", "targetPorts"),
        ("{kubernetes: {pool: p, targetPorts: [8000]}}", "kubernetes.selector", "targetPorts"),
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


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_bytes_that_are_not_text_are_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"epp\.yaml"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{endpointsFile: e, workers: 9, admin: {address: '127.0.0.1:65530'}}", "the highest port is 65535"),
        (
            "{endpointsFile: e, listen: {address: '127.0.0.1:9090'}, admin: {address: '127.0.0.1:9090'}}",
            "127.0.0.1:9090 is taken by listen.address",
        ),
        (
            "{endpointsFile: e, workers: 2, listen: {address: '127.0.0.1:9089'}}",
            "admin.address: 127.0.0.1:9090 is taken by listen.address",
        ),
    ],
)
def test_workers_that_would_share_an_address_are_refused(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert reason in str(caught.value)
