"""Model servers take the profile and the flags of the charts, also where a server spans several nodes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from model_server import serve_flags
from model_server.cli import command_line
from model_server.pods.lora_sync import read_adapters
from tests.charts.rendering import MODEL_SERVER, Helm, HelmError, Manifest, of_kind, value_set

pytestmark = pytest.mark.cluster

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


def server_of(made: Manifest) -> Manifest:
    """Return the server in a Deployment, or in the template of a pod."""
    spec = made["spec"].get("template", made)["spec"]
    return next(c for c in spec["containers"] if c["name"] == "server")


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
    advice = [
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
    assert arguments_of(a) == advice
    assert arguments_of(b) == [*advice, "--tensor-parallel-size", "2"]
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


POOL = "prefix-gateway.dev/pool"


def parts(helm: Helm) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the templates of the leader and of the worker."""
    found = of_kind(helm.render_set(value_set("servers-multi-node")), "LeaderWorkerSet")
    template = found["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def test_a_server_is_a_group_and_replicas_count_groups(helm: Helm) -> None:
    objects = helm.render_set(value_set("servers-multi-node"))
    spec = of_kind(objects, "LeaderWorkerSet")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 4)
    assert "Deployment" not in {o["kind"] for o in objects}


def test_only_the_leader_is_an_endpoint(helm: Helm) -> None:
    leader, worker = parts(helm)
    assert leader["metadata"]["labels"][POOL] == "default"
    assert POOL not in worker["metadata"]["labels"]
    assert [p["name"] for p in server_of(leader)["ports"]] == ["http"]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe"} & set(server_of(worker))
    assert [c["name"] for c in leader["spec"]["initContainers"]] == ["lora-sync"]
    assert "initContainers" not in worker["spec"]


def test_the_role_of_a_pool_is_llm_ds_label_on_its_pods(helm: Helm) -> None:
    values = {
        "role": "decode",
        "profile": {"pools": [{"name": "a"}, {"name": "b"}]},
        "pools": {"b": {"role": "prefill"}},
    }
    made = {
        o["metadata"]["name"][-1]: o["spec"]["template"]["metadata"]["labels"].get("llm-d.ai/role")
        for o in helm.render(MODEL_SERVER, values)
        if o["kind"] == "Deployment"
    }
    assert made == {"a": "decode", "b": "prefill"}


def test_leader_and_worker_are_one_vllm(helm: Helm) -> None:
    leader, worker = map(server_of, parts(helm))
    ranks = ["--nnodes", "4", "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    assert leader["args"][-len(ranks) :] == ranks
    assert worker["args"] == [*leader["args"], "--headless"]
    resources = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"nvidia.com/gpu": 8}}
    assert leader["resources"] == worker["resources"] == resources


def test_a_worker_that_terminates_waits_for_its_leader(helm: Helm) -> None:
    leader, worker = map(server_of, parts(helm))
    assert leader["lifecycle"] == worker["lifecycle"]
    assert {"name": "DRAIN_HOST", "value": "$(LWS_LEADER_ADDRESS)"} in worker["env"]
    assert "DRAIN_HOST" not in {each["name"] for each in leader["env"]}


def test_the_pods_of_a_server_may_speak_to_each_other(helm: Helm) -> None:
    objects = helm.render_set(value_set("servers-multi-node"))
    (rule,) = of_kind(objects, "NetworkPolicy")["spec"]["ingress"]
    worker = parts(helm)[1]["metadata"]["labels"]
    selectors = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert any(wanted.items() <= worker.items() for wanted in selectors)


def test_an_autoscaler_scales_whole_servers(helm: Helm) -> None:
    values = {
        "multiNode": {"enabled": True},
        "autoscaling": {"enabled": True, "keda": {"enabled": True, "prometheus": "http://p:9090"}},
    }
    objects = helm.render(MODEL_SERVER, values)
    target = of_kind(objects, "ScaledObject")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["apiVersion"]) == ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")
    assert "replicas" not in of_kind(objects, "LeaderWorkerSet")["spec"]
