"""The programs accept the configuration that the charts write. The tests let the programs read the
configuration and do not compare its text.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from epp.base.types import SERVER_HEADERS
from epp.config.policy import load_policy
from epp.config.settings import Config, load_config
from epp.serve.envoy import sds
from epp.serve.envoy.bootstrap import bootstrap
from epp.serve.preflight import contradictions
from model_server import serve_flags
from model_server.cli import command_line
from model_server.pods.sync.sync import read_adapters
from tests.charts.rendering import (
    GATEWAY,
    MODEL_SERVER,
    Helm,
    HelmError,
    Manifest,
    behind,
    of_kind,
    pod_of,
    value_set,
)

pytest_plugins = ["tests.charts.fixtures"]
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
    objects = helm.render(GATEWAY, {"shape": "gateway", "inferencePools": pools})
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


def test_behind_envoy_gateway_pods_are_followed_by_label(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render_set(value_set("gateway-envoy-gateway"))
    config = config_of(objects, tmp_path)
    assert config.kubernetes is not None
    assert config.kubernetes.selector
    kinds = {each["kind"] for each in objects}
    assert "InferencePool" not in kinds
    policies = {"EnvoyExtensionPolicy", "BackendTrafficPolicy", "ClientTrafficPolicy", "BackendTLSPolicy"}
    assert policies <= kinds
    (route,) = (each for each in objects if each["kind"] == "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert of_kind(objects, "Service", backend["name"])["spec"]["selector"] == config.kubernetes.selector


def test_behind_envoy_gateway_the_modes_are_values(helm: Helm, tmp_path: Path) -> None:
    usual = value_set("gateway-envoy-gateway").values
    modes = {"failureMode": "FailClose", "bodies": "FullDuplexStreamed", "modeOverride": False}
    objects = helm.render(GATEWAY, {**usual, "gateway": {**usual["gateway"], **modes}})
    (asked,) = of_kind(objects, "EnvoyExtensionPolicy")["spec"]["extProc"]
    assert asked["failOpen"] is False
    assert asked["processingMode"]["request"]["body"] == "FullDuplexStreamed"
    assert asked["processingMode"]["allowModeOverride"] is False
    config = config_of(objects, tmp_path)
    assert not config.holds_streams
    assert not config.streams.mode_override
    assert config_of(helm.render(GATEWAY, usual), tmp_path).streams.mode_override


def test_behind_envoy_gateway_clients_name_no_servers(helm: Helm) -> None:
    policy = of_kind(helm.render_set(value_set("gateway-envoy-gateway")), "ClientTrafficPolicy")
    removed = policy["spec"]["headers"]["earlyRequestHeaders"]["remove"]
    assert removed == ["x-gateway-destination-endpoint", *SERVER_HEADERS]


def test_a_route_removes_headers_that_servers_obey(
    helm: Helm,
) -> None:
    """Routes of gateways that use Envoy keep these headers. There a route's filters run after the picker and
    would remove the headers that the picker has set.
    """
    for provider in ("nginx", "istio", "agentgateway", "ai-gateway", "gke", ""):
        objects = helm.render(GATEWAY, behind(provider, route=True))
        (rule,) = of_kind(objects, "HTTPRoute")["spec"]["rules"]
        removed = [f["requestHeaderModifier"]["remove"] for f in rule.get("filters", ())]
        assert removed == ([[*SERVER_HEADERS]] if provider == "nginx" else []), provider


def test_tracing_reaches_picker_and_envoy_and_is_absent_while_off(helm: Helm, tmp_path: Path) -> None:
    off = helm.render(GATEWAY, {})
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
    told = {each["name"]: each.get("value") for each in picker["env"]}
    assert told == {
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


@pytest.mark.envoy
def test_envoy_starts_with_the_bootstrap_that_the_init_container_makes(helm: Helm, tmp_path: Path) -> None:
    config = config_of(helm.render_set(value_set("gateway-production")), tmp_path)
    document = json.loads(bootstrap(config, output="json"))
    ports = [
        each["address"]["socket_address"]["port_value"] for each in document["static_resources"]["listeners"]
    ]
    spec = of_kind(helm.render_set(value_set("gateway-production")), "Deployment")["spec"]["template"]["spec"]
    assert [port["containerPort"] for port in spec["containers"][0]["ports"]] == ports
    assert document["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    for name in (sds.GATEWAY_IDENTITY, sds.CLIENT_TRUST):
        assert sds.path(config, name).startswith("/run/prefix-gateway/"), "both containers see this folder"


def test_every_field_of_the_program_can_be_set(helm: Helm, tmp_path: Path) -> None:
    values = {"config": {"envoy": {"maxBodyBytes": 70000}, "admin": {"keepDecisions": 5}, "drainSeconds": 1}}
    config = config_of(helm.render(GATEWAY, values), tmp_path)
    assert (config.envoy.max_body_bytes, config.admin.keep_decisions, config.drain_seconds) == (70000, 5, 1)
    assert config.envoy.eds_file == "/run/prefix-gateway/eds.json", "values that were not set stay"


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


# -- model servers -------------------------------------------------------------------------------------------

SOUND: dict[str, Any] = {
    "model": "org/llama",
    "servedNames": ["llama"],
    "blockSizeTokens": 16,
    "maxModelLenTokens": 8192,
    "hashSeed": 0,
    "exactRouting": True,
    "kvEvents": {"replayEndpoint": "tcp://*:5558"},
    "lora": {"maxLoras": 2, "adapters": [{"name": "sql", "path": "/adapters/sql"}], "runtimeUpdates": True},
    "extraArgs": ["--enforce-eager"],
    "extraEnv": {"OMP_NUM_THREADS": "4"},
}
POOLS = [{"name": "a"}, {"name": "b", "extraArgs": ["--tensor-parallel-size", "2"], "extraEnv": {"X": "1"}}]
PROFILES: dict[str, dict[str, Any]] = {
    "least": {"model": "org/llama"},
    "sound": SOUND,
    "pools": {**SOUND, "pools": POOLS},
    "numbers": {
        "model": "m",
        "port": 8123,
        "hashSeed": 4294967295,
        "maxModelLenTokens": 1048576,
        "blockSizeTokens": 32,
    },
    "events": {"model": "m", "blockSizeTokens": 16, "hashSeed": 0, "kvEvents": {}},
    "ipc": {
        "model": "m",
        "blockSizeTokens": 16,
        "hashSeed": 0,
        "kvEvents": {"endpoint": "ipc:///run/x", "topic": "t"},
    },
    "lora": {"model": "m", "lora": {"maxCpuLoras": 8, "maxRank": 64}},
    "offload": {"model": "m", "kvOffload": {"memoryBytes": 16000000000}},
    "uses": {"model": "m", "kvOffload": {"memoryBytes": 1, "policy": "uses"}},
}


def server_of(deployment: Manifest) -> Manifest:
    return next(c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "server")


def arguments_of(deployment: Manifest) -> list[Any]:
    """Return the arguments, with their JSON parsed."""
    return [json.loads(a) if a.startswith("{") else a for a in server_of(deployment)["args"]]


def always(model: str) -> list[str]:
    return [*(model, "--port", "8000"), *HASHED]


HASHED = (
    "--enable-prefix-caching",
    "--prefix-caching-hash-algo",
    "sha256_cbor",
    "--enable-prompt-tokens-details",
)
EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}
OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
SAID: dict[str, list[Any]] = {
    "least": always("org/llama"),
    "numbers": ["m", "--port", "8123", "--max-model-len", "1048576", "--block-size", "32", *HASHED],
    "ipc": [
        *("m", "--port", "8000", "--block-size", "16", *HASHED),
        *("--kv-events-config", {**EVENTS, "endpoint": "ipc:///run/x", "topic": "t"}),
    ],
    "lora": [
        *(*always("m"), "--enable-lora", "--max-loras", "1"),
        *("--max-lora-rank", "64", "--max-cpu-loras", "8"),
    ],
    "offload": [
        *(*always("m"), "--kv-transfer-config"),
        {
            **OFFLOAD,
            "kv_connector_extra_config": {"cpu_bytes_to_use": 16000000000, "eviction_policy": "lru"},
        },
    ],
    "uses": [
        *(*always("m"), "--kv-transfer-config"),
        {
            **OFFLOAD,
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 1,
                "eviction_policy": "UsesCachePolicy",
                "cache_policy_module_path": "model_server.pods.vllm.offload_policy",
            },
        },
    ],
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_vllm_gets_the_arguments_that_its_profile_stands_for(helm: Helm, name: str) -> None:
    objects = helm.render(MODEL_SERVER, {"profile": {"servedNames": None, **PROFILES[name]}}, release="s")
    assert arguments_of(of_kind(objects, "Deployment", "s-model-server")) == SAID[name]


def test_each_pool_of_a_profile_has_its_own_arguments_and_variables(helm: Helm) -> None:
    objects = helm.render(MODEL_SERVER, {"profile": PROFILES["pools"]}, release="s")
    a, b = (of_kind(objects, "Deployment", f"s-model-server-{pool}") for pool in ("a", "b"))
    said = [
        *("org/llama", "--port", "8000", "--served-model-name", "llama", "--max-model-len", "8192"),
        *("--block-size", "16", *HASHED, "--kv-events-config"),
        {
            **EVENTS,
            "endpoint": "tcp://*:5557",
            "topic": "kv-events",
            "replay_endpoint": "tcp://*:5558",
        },
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"),
        *("--lora-modules", "sql=/adapters/sql", "--enforce-eager"),
    ]
    assert arguments_of(a) == said
    assert arguments_of(b) == [*said, "--tensor-parallel-size", "2"]
    variables = {each["name"]: each["value"] for each in server_of(b)["env"]}
    wanted = {"PYTHONHASHSEED": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "OMP_NUM_THREADS": "4"}
    assert variables.items() >= {**wanted, "X": "1"}.items()
    ports = {each["name"]: each["containerPort"] for each in server_of(b)["ports"]}
    assert ports == {"http": 8000, "kv-events": 5557, "kv-replay": 5558}


REFUSED: list[dict[str, Any]] = [
    {"prefixCaching": False},
    {"hashSeed": None},
    {"hashSeed": -1},
    {"blockSizeTokens": None},
    {"hashAlgorithm": "sha256"},
    {"hashAlgorithm": "md5"},
    {"kvEvents": None},
    {"pools": [{"name": "a"}, {"name": "b", "hashSeed": 1}]},
    {"pools": [{"name": "a", "hashSeed": 3}, {"name": "b"}], "hashSeed": None},
    {"pools": [{"name": "a"}, {"name": "b", "blockSizeTokens": 32}]},
    {"pools": [{"name": "a"}, {"name": "b", "hashAlgorithm": "sha256"}], "exactRouting": False},
    {"pools": [{"name": "a"}, {"name": "a"}]},
    {"kvEvents": {"endpoint": "tcp://127.0.0.1:5557"}},
    {"kvEvents": {"replayEndpoint": "tcp://localhost:99"}},
    {"kvEvents": {"endpoint": "inproc://x"}},
    {"kvEvents": {"endpoint": "tcp://*:0"}},
    {"kvEvents": {"endpoint": "tcp://*:8000"}},
    {"kvEvents": {"endpoint": "tcp://*:70000"}},
    {"kvEvents": {"endpoint": "tcp://*:5557", "replayEndpoint": "tcp://*:5557"}},
    {"lora": {"maxLoras": 0}},
    {"lora": {"maxRank": 24}},
    {"lora": {"maxLoras": 4, "maxCpuLoras": 2}},
    {"lora": {"adapters": [{"name": "sql", "path": "adapters/sql"}]}},
    {"lora": {"adapters": [{"name": "llama", "path": "/a"}]}},
    {"lora": {"adapters": [{"name": "x", "path": "/a"}, {"name": "x", "path": "/b"}]}},
    {"lora": {"adapters": [{"name": "a=b", "path": "/a"}]}},
    {"kvOffload": {"memoryBytes": 0}},
    {"kvOffload": {"memoryBytes": 4, "policy": "fifo"}},
    {"kvOffload": {"memoryBytes": 4}, "extraArgs": ["--kv-transfer-config={}"]},
    {"port": 0},
    {"model": "-m"},
    {"servedNames": ["a", "a"]},
    {"extraArgs": ["--block-size=32"]},
    {"extraArgs": ["--enable_lora"]},
    {"extraArgs": ["--disable-log-stats"]},
    {"extraEnv": {"PYTHONHASHSEED": "1"}},
    {"pools": [{"name": "a", "extraArgs": ["--port", "1"]}]},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_helm_refuses_profiles_that_break_routing_or_vllm(helm: Helm, changes: dict[str, Any]) -> None:
    profile = {k: v for k, v in {**SOUND, **changes}.items() if v is not None}
    with pytest.raises(HelmError):
        helm.render(MODEL_SERVER, {"profile": profile})


@pytest.mark.parametrize("name", sorted(set(PROFILES) - {"pools"}))
def test_the_simulated_server_takes_the_same_profile(helm: Helm, name: str) -> None:
    values = {
        "engine": "simulated",
        "profile": PROFILES[name],
        "simulated": {"args": ["--num-blocks", 2048, "--max-body-bytes", 3000000, "--speed", 1.5]},
    }
    container = server_of(of_kind(helm.render(MODEL_SERVER, values, release="s"), "Deployment"))
    assert container["command"] == ["model-server", "serve"]
    settings = serve_flags.settings(command_line().parse_args(["serve", *container["args"]]))
    profile = PROFILES[name]
    assert settings.host == "0.0.0.0"
    assert settings.max_body_bytes == 3000000, "a number is a word, too"
    assert (settings.port, settings.model, settings.num_blocks) == (
        profile.get("port", 8000),
        profile["model"],
        2048,
    )
    assert settings.max_model_len_tokens == profile.get("maxModelLenTokens")
    assert settings.cache.hash_algorithm == "sha256_cbor"
    assert (settings.kv_events is not None) == ("kvEvents" in profile)
    if (lora := profile.get("lora")) is not None:
        assert settings.limits.max_loras == lora.get("maxLoras", 1)
        assert [a.name for a in settings.adapters] == [a["name"] for a in lora.get("adapters", ())]


@pytest.mark.parametrize("claim", ["", "prefixes"])
def test_a_simulated_server_keeps_prefixes_where_the_values_say(helm: Helm, claim: str) -> None:
    values = {
        "engine": "simulated",
        "replicas": 1,
        "profile": {"pools": [{"name": "a"}, {"name": "b"}]},
        "simulated": {
            "args": ["--runner", "hf", "--kv-store-chunk-share", 1],
            "kvStore": {"enabled": True, "sizeGB": 2.5, "ratio": 0.25, "claimName": claim},
        },
    }
    for pool in ("a", "b"):
        objects = helm.render(MODEL_SERVER, values, release="servers")
        deployment = of_kind(objects, "Deployment", f"servers-model-server-{pool}")
        container = server_of(deployment)
        store = serve_flags.settings(command_line().parse_args(["serve", *container["args"]])).kv_store
        assert store is not None
        assert (store.size_bytes, store.ratio, store.chunk_share) == (2_500_000_000, 0.25, 1.0)
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "kv-store"]
        assert store.folder == Path(mount["mountPath"]) / pool, (
            "pools that share a claim do not share a store"
        )
        [volume] = [
            each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "kv-store"
        ]
        kept = (
            {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {"sizeLimit": "3125M"}}
        )
        assert volume == {"name": "kv-store", **kept}
        strategy = deployment["spec"]["strategy"]
        assert (strategy.get("type") == "Recreate") == bool(claim), "one server at a time has the folder"


def test_the_lora_sidecar_takes_its_flags_and_its_file(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render_set(value_set("servers-vllm"))
    path = tmp_path / "adapters.yaml"
    path.write_text(of_kind(objects, "ConfigMap", "servers-model-server-adapters")["data"]["adapters.yaml"])
    assert dict(read_adapters(path)) == {"sql": "/adapters/sql"}
    deployment = of_kind(objects, "Deployment", "servers-model-server-h100")
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]
    args = command_line().parse_args([*shlex.split(sidecar["command"][1]), *sidecar["args"]])
    assert args.server == "http://127.0.0.1:8000"
    assert args.status_port == sidecar["ports"][0]["containerPort"]


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
