"""Launch profiles: the files that they write for vLLM, and the reasons for which a profile is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_server.cli import main
from model_server.pods.sync.files import read_adapters
from model_server.pods.vllm.checks import problems
from model_server.pods.vllm.errors import ProfileError
from model_server.pods.vllm.profile import (
    KvEvents,
    KvOffload,
    Lora,
    Pool,
    Profile,
    arguments,
    environment,
    of_pool,
    pod_patch,
    read,
)

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


def text(**changes: Any) -> str:
    return yaml.safe_dump({k: v for k, v in {**SOUND, **changes}.items() if v is not None})


def complaints(**changes: Any) -> dict[str, str]:
    """Return the whole message for each place."""
    return {problem.where: str(problem) for problem in problems(read(text(**changes)))}


def test_a_profile_becomes_the_arguments_of_vllm_serve() -> None:
    args = arguments(read(text()))
    events = args[args.index("--kv-events-config") + 1]
    assert json.loads(events) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv-events",
    }
    args.remove(events)
    assert args == shlex.split(
        "org/llama --port 8000 --served-model-name llama --max-model-len 8192 --block-size 16 "
        "--enable-prefix-caching --prefix-caching-hash-algo sha256_cbor --enable-prompt-tokens-details "
        "--kv-events-config --enable-lora --max-loras 2 --max-lora-rank 16 --lora-modules sql=/adapters/sql "
        "--enforce-eager"
    )


def test_a_profile_becomes_the_environment_and_a_pod_patch() -> None:
    profile = read(text())
    variables = {"PYTHONHASHSEED": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "OMP_NUM_THREADS": "4"}
    assert environment(profile) == variables
    [container] = pod_patch(profile)["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "vllm"
    assert container["args"] == arguments(profile)
    assert {entry["name"]: entry["value"] for entry in container["env"]} == variables
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [
        ("http", 8000),
        ("kv-events", 5557),
        ("kv-replay", 5558),
    ]


def test_the_smallest_profile_is_sound() -> None:
    profile = read("model: org/llama")
    assert problems(profile) == []
    assert environment(profile) == {}
    assert "--kv-events-config" not in arguments(profile)


def test_a_pool_adds_its_own_arguments_and_environment() -> None:
    pools = [{"name": "big", "extraArgs": ["--tensor-parallel-size", "2"], "extraEnv": {"X": "1"}}]
    profile = read(text(pools=pools))
    assert problems(profile) == []
    big = of_pool(profile, "big")
    assert arguments(big) == [*arguments(profile), "--tensor-parallel-size", "2"]
    assert environment(big) == {**environment(profile), "X": "1"}


ADAPTER = {"name": "sql", "path": "/a"}


@pytest.mark.parametrize(
    ("changes", "where", "why"),
    [
        ({"prefixCaching": False}, "prefixCaching", "caches that do not exist"),
        ({"hashSeed": None}, "hashSeed", "random in older releases"),
        ({"hashSeed": -1}, "hashSeed", "does not start"),
        ({"blockSizeTokens": None}, "blockSizeTokens", "must know it beforehand"),
        ({"hashAlgorithm": "sha256"}, "hashAlgorithm", "sha256_cbor"),
        ({"hashAlgorithm": "xxhash_cbor"}, "hashAlgorithm", "sha256_cbor"),
        ({"hashAlgorithm": "md5"}, "hashAlgorithm", "does not know the hash algorithm 'md5'"),
        ({"kvEvents": None}, "exactRouting", "kvEvents: {}"),
        ({"pools": [{"name": "a"}, {"name": "b", "hashSeed": 1}]}, "pools: hashSeed", "0, 1"),
        (
            {"pools": [{"name": "a", "hashSeed": 3}, {"name": "b"}], "hashSeed": None},
            "pools.b.hashSeed",
            "hashSeed: 0",
        ),
        (
            {"pools": [{"name": "a"}, {"name": "b", "blockSizeTokens": 32}]},
            "pools: blockSizeTokens",
            "16, 32",
        ),
        (
            {"pools": [{"name": "a"}, {"name": "b", "hashAlgorithm": "sha256"}], "exactRouting": False},
            "pools: hashAlgorithm",
            "different block hashes",
        ),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "pools", "2 times"),
        ({"kvEvents": {"endpoint": "tcp://127.0.0.1:5557"}}, "kvEvents.endpoint", "tcp://*:5557"),
        ({"kvEvents": {"replayEndpoint": "tcp://localhost:99"}}, "kvEvents.replayEndpoint", "tcp://*:99"),
        ({"kvEvents": {"endpoint": "inproc://x"}}, "kvEvents.endpoint", "could bind"),
        ({"kvEvents": {"endpoint": "tcp://*:0"}}, "kvEvents.endpoint", "Port 0 is not known"),
        ({"kvEvents": {"endpoint": "tcp://*:8000"}}, "port and kvEvents.endpoint", "different ports"),
        ({"lora": {"maxLoras": 0, "adapters": [ADAPTER]}}, "lora.maxLoras", "1 adapters are listed"),
        ({"lora": {"maxLoras": 0}}, "lora.maxLoras", "no lora at all"),
        ({"lora": {"maxRank": 24}}, "lora.maxRank", "one of 1, 8, 16"),
        ({"lora": {"maxLoras": 4, "maxCpuLoras": 2}}, "lora.maxCpuLoras", "less than lora.maxLoras"),
        ({"lora": {"adapters": [ADAPTER, ADAPTER]}}, "lora.adapters", "each name once"),
        ({"lora": {"adapters": [{"name": "llama", "path": "/a"}]}}, "lora.adapters[0].name", "another name"),
        (
            {"lora": {"adapters": [{"name": "a=b", "path": "/a"}]}},
            "lora.adapters[0].name",
            "cannot be passed",
        ),
        ({"lora": {"adapters": [{"name": "x", "path": "a"}]}}, "lora.adapters[0].path", "absolute"),
        ({"extraArgs": ["--block_size=32"]}, "extraArgs", "Instead: blockSizeTokens"),
        ({"extraArgs": ["--kv-events-config.publisher=null"]}, "extraArgs", "Instead: kvEvents"),
        ({"extraArgs": ["--disable-log-stats"]}, "extraArgs", "/metrics"),
        ({"extraEnv": {"PYTHONHASHSEED": "1"}}, "extraEnv", "Instead: hashSeed"),
        ({"pools": [{"name": "a", "extraArgs": ["--max-loras", "9"]}]}, "pools.a.extraArgs", "lora.maxLoras"),
        ({"model": ""}, "model", "is not a name"),
        ({"servedNames": ["--x"]}, "servedNames", "flag"),
    ],
)
def test_settings_that_break_routing_are_refused_with_what_to_write(
    changes: dict[str, Any], where: str, why: str
) -> None:
    found = complaints(**changes)
    assert found.keys() == {where}
    assert why in found[where]
    assert "Instead: " in found[where]


def blocks_of_the_docs() -> list[str]:
    page = (Path(__file__).parents[5] / "docs" / "vllm-pods.md").read_text()
    return [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]


def test_the_profile_in_the_docs_is_sound_and_every_field_is_explained() -> None:
    [profile, _] = blocks_of_the_docs()
    assert problems(read(profile)) == []
    page = (Path(__file__).parents[5] / "docs" / "vllm-pods.md").read_text()
    for kind in (Profile, KvEvents, KvOffload, Lora, Pool):
        for field in kind.__struct_encode_fields__:
            assert f"`{field}`" in page, field


def test_the_adapter_file_in_the_docs_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(blocks_of_the_docs()[1])
    assert list(read_adapters(file)) == ["sql", "legal"]


def test_all_problems_are_reported_at_once() -> None:
    assert complaints(hashSeed=None, prefixCaching=False, port=0).keys() == {
        "hashSeed",
        "prefixCaching",
        "port",
    }


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ("model: [", "the file"),
        ("- a", "the file"),
        ("model: x\nblockSize: 16", "the file"),
        ("model: x\nlora: {adapters: [{name: a}]}", "lora.adapters[0]"),
        ("model: x\nkvEvents: {endpoint: 5557}", "kvEvents.endpoint"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_field(raw: str, where: str) -> None:
    with pytest.raises(ProfileError) as refused:
        read(raw)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_the_exit_code_says_whether_the_profile_is_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text())
    command = ["profile", "--file", str(file)]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("sound: org/llama on port 8000; KV events at tcp://*:5557 (")
    assert main([*command, "--output", "args"]) == 0
    assert shlex.split(capsys.readouterr().out) == arguments(read(text()))
    assert main([*command, "--output", "env"]) == 0
    assert "PYTHONHASHSEED=0\n" in capsys.readouterr().out
    assert main([*command, "--output", "pod-patch"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == pod_patch(read(text()))

    file.write_text(text(hashSeed=None, prefixCaching=False))
    assert main([*command, "--output", "args"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 2
    assert main(["profile", "--file", str(tmp_path / "none")]) == 1


def test_a_profile_with_pools_needs_the_name_of_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text(pools=[{"name": "a"}, {"name": "b", "extraArgs": ["--swap"]}]))
    command = ["profile", "--file", str(file), "--output", "args"]
    assert main(command) == 2
    assert "--pool: a, b" in capsys.readouterr().err
    assert main([*command, "--pool", "c"]) == 2
    capsys.readouterr()
    assert main([*command, "--pool", "b"]) == 0
    assert capsys.readouterr().out.endswith(" --enforce-eager --swap\n")
    assert main(command[:-2]) == 0
    assert "seed 0" in capsys.readouterr().out


def test_offloading_to_main_memory_names_a_policy_that_vllm_can_load() -> None:
    def connector(policy: str) -> dict[str, Any]:
        args = arguments(read(text(kvOffload={"memoryBytes": 4_000_000_000, "policy": policy})))
        config = json.loads(args[args.index("--kv-transfer-config") + 1])
        assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
        extra: dict[str, Any] = config["kv_connector_extra_config"]
        assert extra.pop("cpu_bytes_to_use") == 4_000_000_000
        return extra

    assert connector("arc") == {"eviction_policy": "arc"}
    assert connector("uses") == {
        "eviction_policy": "UsesCachePolicy",
        "cache_policy_module_path": "model_server.pods.vllm.offload_policy",
    }
    assert connector("importance") == connector("uses"), "the name of release 0.2.0"


def test_offload_tier_without_memory_or_with_an_unknown_policy_is_refused() -> None:
    told = complaints(kvOffload={"memoryBytes": 0, "policy": "fifo"})
    assert "lru, arc or uses" in told["kvOffload.policy"]
    assert "without memory" in told["kvOffload.memoryBytes"]


def test_another_kv_connector_is_refused_only_beside_kv_offload() -> None:
    other = ["--kv-transfer-config={}"]
    assert complaints(extraArgs=other) == {}
    offload = {"memoryBytes": 1_000_000}
    assert "not both" in complaints(extraArgs=other, kvOffload=offload)["extraArgs"]
    pools = [{"name": "a", "extraArgs": ["--kv_offloading_size", "4"]}]
    assert "not both" in complaints(pools=pools, kvOffload=offload)["extraArgs"]
