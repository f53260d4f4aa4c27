"""The configuration file: defaults, messages for mistakes, addresses of workers, and forms of Redis URLs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.base.errors import ConfigError
from epp.config.policy import PolicySpec
from epp.config.reading import read_secret
from epp.config.sections import Listen
from epp.config.settings import Config, load_config
from epp.config.sharing import RedisTarget
from tests.reference.schema import definitions


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
drainSeconds: 5
listen: {address: "[::1]:65534", tls: {certFile: c.pem, keyFile: k.pem, clientCaFile: ca.pem}}
admin: {address: "0.0.0.0:65534"}
envoy: {listen: "0.0.0.0:8080", edsFile: eds.yaml, failOpen: false, numRetries: 1}
log: {level: debug, format: text}
"""
    )
    config = load_config(file)
    assert config.listen.tls is not None
    assert config.listen.tls.client_ca_file == str(file.parent / "ca.pem")
    assert config.workers == 2
    assert not config.envoy.fail_open
    assert not config.holds_streams, "all answers in flight would break off when the picker dies"


def test_paths_count_from_the_folder_of_the_configuration(file: Path) -> None:
    file.write_text(
        "{endpointsFile: ./e.yaml, policyFile: /p, envoy: {extraHttpFilters: [{name: f, caFile: x}]}}"
    )
    config = load_config(file)
    assert (config.endpoints_file, config.policy_file) == (f"{file.parent}/e.yaml", "/p")
    (file.parent / "link").symlink_to(file.parent)
    assert load_config(file.parent / "link" / file.name).endpoints_file == f"{file.parent}/link/e.yaml"
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
        ("endpointsFile: e, kubernetes: {pool: p}", "endpointsFile", "remove one"),
        ("envoy: {status: '127.0.0.1:9901'}", "envoy.status", "envoy.admin"),
        ("listen: {tls: {certFile: c}}", "listen.tls", "keyFile"),
        ("listen: {address: 'localhost:9002'}", "listen.address", "ip:port"),
        ("listen: {address: 'unix:epp.sock'}", "listen.address", "absolute"),
        ("listen: {address: 'unix:/s', tls: {certFile: c, keyFile: k}}", "listen.tls", "no TLS"),
        ("allowedPaths: [/v1/models]", "allowedPaths[0]", "not in blockedPaths"),
        ("blockedPaths: [/sleep], allowedPaths: [/docs]", "allowedPaths[0]", "/docs"),
        ("listen: {healthAddress: 9003}", "listen.healthAddress", "a text"),
        ("envoy: {listen: '0.0.0.0:0'}", "envoy.listen", "out of range"),
        ("envoy: {listen: ''}", "envoy.listen", "ip:port"),
        ("envoy: {extraHttpFilters: [{typed_config: {}}]}", "envoy.extraHttpFilters[0]", "has no name"),
        ("envoy: {admin: '::1:9901'}", "envoy.admin", "brackets"),
        ("holdStreams: false", "`holdStreams` was removed", "envoy.failOpen: false"),
        ("endpointsFile: 2023-99-01", "month", "12"),
        ("envoy: {tls: {keyFile: k}}", "envoy.tls", "certFile"),
        (
            "exactMode: {models: [{hashAlgorithm: auto}]}",
            "exactMode.models[0]",
            "`hashAlgorithm` was removed",
        ),
        ("kubernetes: {namespace: n}", "kubernetes.pool", "pools"),
        ("kubernetes: {pool: p, pools: [q]}", "kubernetes.pool", "either"),
        ("kubernetes: {pools: [p, q, p]}", "kubernetes.pools", "twice"),
        ("kubernetes: {pools: [p, Q]}", "kubernetes.pools", "; write "),
        (
            "kubernetes: {pools: [p, q], selector: {a: b}, targetPorts: [1]}",
            "kubernetes.selector",
            "kubernetes.pool",
        ),
        ("kubernetes: {pool: p, status: {events: false}}", "kubernetes", "`status` was removed"),
        ("kubernetes: {pool: p, addressFamily: IPv6}", "kubernetes", "`addressFamily` was removed"),
        ("kubernetes: {pool: p, selector: {app: vllm}}", "kubernetes.selector", "targetPorts"),
        ("kubernetes: {pool: p, targetPorts: [8000]}", "kubernetes.selector", "targetPorts"),
        ("kubernetes: {pool: p, selector: {'a,b': c}}", "kubernetes.selector", "form as each name; write "),
        ("kubernetes: {pool: p, rewrites: [gateway.networking.k8s.io]}", "kubernetes.rewrites", "values are"),
        ("workers: 2, admin: {address: '127.0.0.1:65535'}", "admin", "2 workers need 2 consecutive ports"),
        ("listen: '[::]:9090'", "admin.address", "127.0.0.1:9090 is taken by listen.address"),
        ("workers: 2, listen: 127.0.0.1:9089", "admin.address", "127.0.0.1:9090 is taken by listen.address"),
        ("sharing: {redis: {}}", "redis", "url"),
        ("sharing: {redis: {url: 'redis://a', tls: {caFile: ca.pem}}}", "tls", "rediss"),
        ("sharing: {redis: {url: 'rediss://a', tls: {certFile: c}}}", "tls", "keyFile"),
        (
            "sharing: {redis: {url: 'redis://a', sentinelUsername: s}}",
            "redis.sentinelPasswordFile",
            "no sentinels",
        ),
        ("sharing: {pool: 'a b'}", "pool", "; write "),
        ("sharing: {flushIntervalSeconds: 0}", "flushIntervalSeconds", "0.005"),
    ],
)
def test_a_mistake_is_refused_with_the_file_the_field_and_the_reason(
    file: Path, text: str, field: str, why: str
) -> None:
    source = "" if text.startswith(("endpointsFile", "kubernetes: {")) else "endpointsFile: e, "
    file.write_text(f"{{{source}{text}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert field in message
    assert why in message


@pytest.mark.parametrize(
    ("address", "workers", "expected"),
    [
        ("unix:/run/p.sock", 1, ("unix:/run/p.sock",)),
        ("unix:/run/p.sock", 2, ("unix:/run/p.sock.0", "unix:/run/p.sock.1")),
        ("10.0.0.1:9002", 1, ("10.0.0.1:9002",)),
        ("[fd00::1]:9002", 3, ("[fd00::1]:9002", "[fd00::1]:9003", "[fd00::1]:9004")),
    ],
)
def test_each_worker_has_its_own_address(address: str, workers: int, expected: tuple[str, ...]) -> None:
    assert Listen(address=address).addresses(workers=workers) == expected


def fields(root: type[msgspec.Struct]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, section in definitions(root).items():
        for field, schema in section["properties"].items():
            yield f"{name}.{field}", schema


@pytest.mark.parametrize("root", [Config, PolicySpec])
def test_every_field_that_people_write_has_a_description(root: type[msgspec.Struct]) -> None:
    """A field that holds a section is described by the docstring of the section."""
    bare = [
        name for name, schema in fields(root) if not schema.get("description") and "$ref" not in str(schema)
    ]
    assert bare == []


def test_white_space_around_a_secret_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"  sixteen bytes!!! \n")
    assert read_secret(str(file), field="f") == b"sixteen bytes!!!"


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"  fifteen bytes!! \n", 15)])
def test_a_secret_that_is_too_short_is_refused(tmp_path: Path, content: bytes, size: int) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^f: {file}: holds {size} bytes; a secret that nobody can guess"):
        read_secret(str(file), field="f")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://r", RedisTarget(kind="single", hosts=(("r", 6379),), tls=False)),
        (
            "valkey://10.0.0.1:7000/3",
            RedisTarget(kind="single", hosts=(("10.0.0.1", 7000),), tls=False, database=3),
        ),
        ("rediss://[fd00::1]:7000", RedisTarget(kind="single", hosts=(("fd00::1", 7000),), tls=True)),
        (
            "valkeys+cluster://a:7000,b",
            RedisTarget(kind="cluster", hosts=(("a", 7000), ("b", 6379)), tls=True),
        ),
        (
            "redis+sentinel://a,b:5000/main/2",
            RedisTarget(
                kind="sentinel", hosts=(("a", 26379), ("b", 5000)), tls=False, database=2, master="main"
            ),
        ),
    ],
)
def test_a_url_says_how_redis_is_reached(url: str, target: RedisTarget) -> None:
    assert RedisTarget.parse(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "http://r",
        "redis+ring://r",
        "redis://:secret@r",
        "redis://r?db=secret",
        "redis://a,b",
        "redis://",
        "redis://a:secret",
        "redis://a:0",
        "redis://a/secret",
        "redis+cluster://a/1",
        "redis+sentinel://a",
        "redis+sentinel://a//1",
    ],
)
def test_any_other_url_gets_the_forms_and_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="write redis://host:6379/0") as caught:
        RedisTarget.parse(url)
    assert "secret" not in str(caught.value)
