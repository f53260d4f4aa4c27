"""A launch profile is one YAML file from which all vLLM pods behind one gateway are started in the same way.

`read` reads the file, and the module `checks` checks it. `arguments`, `environment` and `pod_patch` say how
to start `vllm serve`. Pools are groups of pods that differ, for example in their cards or prices. Settings
that decide block hashes must not differ.

This module does not run vLLM, and knows no cluster. Caller: the command `model-server profile`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from model_server.pods.vllm.errors import Problem, ProfileError

DEFAULT_EVENTS_ENDPOINT = "tcp://*:5557"
DEFAULT_TOPIC = "kv-events"

USES = "uses"
_OLD_NAME_OF_USES = "importance"
POLICY_MODULE = "model_server.pods.vllm.offload_policy"
POLICY_CLASS = "UsesCachePolicy"
OFFLOAD_POLICIES = ("lru", "arc", USES, _OLD_NAME_OF_USES)

_EVENTS_PORT_NAMES = ("kv-events", "kv-replay")


class _Part(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class KvEvents(_Part, frozen=True):
    """The ZeroMQ addresses at which vLLM publishes its KV events."""

    endpoint: str = DEFAULT_EVENTS_ENDPOINT
    replay_endpoint: str | None = None
    topic: str = DEFAULT_TOPIC


class LoraAdapter(_Part, frozen=True):
    name: str
    path: str


class Lora(_Part, frozen=True):
    max_loras: int = 1
    """The most adapters in one batch."""
    max_rank: int = 16
    max_cpu_loras: int | None = None
    """The most adapters in memory. None means as many as in one batch."""
    adapters: tuple[LoraAdapter, ...] = ()
    runtime_updates: bool = False
    """Lets `model-server lora-sync` load and unload adapters while the server runs."""


class KvOffload(_Part, frozen=True):
    """Makes vLLM keep KV that leaves GPU memory in main memory (vLLM's OffloadingConnector)."""

    memory_bytes: int
    """The main memory of each pod."""
    policy: str = "lru"
    """`lru` and `arc` are vLLM's. `uses` is `offload_policy` of this package, which the image must contain.
    Release 0.2.0 called it `importance`.
    """


class Pool(_Part, frozen=True):
    """Pods that differ from other pods. A setting that is missing here has the value of the profile."""

    name: str
    block_size_tokens: int | None = None
    hash_algorithm: str | None = None
    hash_seed: int | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)


class Profile(_Part, frozen=True):
    model: str
    served_names: tuple[str, ...] = ()
    """The model's names in requests. Empty means the model's own name."""
    container: str = "vllm"
    """The container of the pod to which the patch applies."""
    port: int = 8000
    block_size_tokens: int | None = None
    max_model_len_tokens: int | None = None
    prefix_caching: bool = True
    hash_algorithm: str = "sha256_cbor"
    hash_seed: int | None = None
    """PYTHONHASHSEED of every pod. The chain of block hashes starts from it."""
    exact_routing: bool = False
    """True if another program computes the same block hashes from tokens and matches them with KV events.
    """
    kv_events: KvEvents | None = None
    kv_offload: KvOffload | None = None
    lora: Lora | None = None
    pools: tuple[Pool, ...] = ()
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_names or (self.model,)


def read(text: str | bytes) -> Profile:
    """Return the profile as written. Only types are checked. A ProfileError names the field at fault."""
    try:
        raw = yaml.safe_load(text)
        return msgspec.convert(raw, Profile)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())  # YAML's own messages have several lines
        raise ProfileError([Problem("the file", f"It is not YAML: {why}.", "a YAML mapping.")]) from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        place = where.strip("`.") or "the file"
        raise ProfileError(
            [Problem(place, f"{message}.", "a field and a value as in docs/vllm-pods.md.")]
        ) from error


def of_pool(profile: Profile, name: str) -> Profile:
    """Return the profile with one pool's differences applied. Raise KeyError if no pool has this name."""
    pool = next((pool for pool in profile.pools if pool.name == name), None)
    if pool is None:
        raise KeyError(name)
    changes: dict[str, Any] = {
        field: value
        for field in ("block_size_tokens", "hash_algorithm", "hash_seed")
        if (value := getattr(pool, field)) is not None
    }
    return msgspec.structs.replace(
        profile,
        pools=(),
        extra_args=(*profile.extra_args, *pool.extra_args),
        extra_env={**profile.extra_env, **pool.extra_env},
        **changes,
    )


def arguments(profile: Profile) -> list[str]:
    """Return the arguments after `vllm serve`."""
    found = [profile.model, "--port", str(profile.port)]
    if profile.served_names:
        found += ["--served-model-name", *profile.served_names]
    if profile.max_model_len_tokens is not None:
        found += ["--max-model-len", str(profile.max_model_len_tokens)]
    if profile.block_size_tokens is not None:
        found += ["--block-size", str(profile.block_size_tokens)]
    found += ["--enable-prefix-caching", "--prefix-caching-hash-algo", profile.hash_algorithm]
    found.append("--enable-prompt-tokens-details")
    if profile.kv_events is not None:
        found += ["--kv-events-config", _events_config(profile.kv_events)]
    if profile.kv_offload is not None:
        found += ["--kv-transfer-config", _offload_config(profile.kv_offload)]
    if profile.lora is not None:
        found += _lora_arguments(profile.lora)
    return [*found, *profile.extra_args]


def environment(profile: Profile) -> dict[str, str]:
    found: dict[str, str] = {}
    if profile.hash_seed is not None:
        found["PYTHONHASHSEED"] = str(profile.hash_seed)
    if profile.lora is not None and profile.lora.runtime_updates:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return {**found, **profile.extra_env}


def pod_patch(profile: Profile) -> dict[str, Any]:
    """Return a strategic merge patch for a Deployment or StatefulSet whose image starts `vllm serve`."""
    ports = [{"name": "http", "containerPort": profile.port}]
    events = profile.kv_events
    if events is not None:
        addresses = (events.endpoint, events.replay_endpoint)
        for name, address in zip(_EVENTS_PORT_NAMES, addresses, strict=True):
            if address is not None and (number := tcp_port(address)) is not None:
                ports.append({"name": name, "containerPort": number})
    container = {
        "name": profile.container,
        "args": arguments(profile),
        "env": [{"name": name, "value": value} for name, value in environment(profile).items()],
        "ports": ports,
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
    }
    return {"spec": {"template": {"spec": {"containers": [container]}}}}


def shell_line(words: Sequence[str]) -> str:
    return shlex.join(words)


def shell_variables(variables: Mapping[str, str]) -> str:
    """Return one assignment a line, as in `env` files and shells."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def tcp_port(address: str) -> int | None:
    """Return the port of a tcp:// address. Return None for any other address, or an address that does not end
    with a number.
    """
    scheme, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port.isdecimal() and len(port) <= 5 else None


def _events_config(events: KvEvents) -> str:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.endpoint,
        "topic": events.topic,
    }
    if events.replay_endpoint is not None:
        config["replay_endpoint"] = events.replay_endpoint
    return msgspec.json.encode(config).decode()


def _offload_config(offload: KvOffload) -> str:
    extra: dict[str, object] = {"cpu_bytes_to_use": offload.memory_bytes, "eviction_policy": offload.policy}
    if offload.policy in (USES, _OLD_NAME_OF_USES):
        extra |= {"eviction_policy": POLICY_CLASS, "cache_policy_module_path": POLICY_MODULE}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return msgspec.json.encode(config).decode()


def _lora_arguments(lora: Lora) -> list[str]:
    found = ["--enable-lora", "--max-loras", str(lora.max_loras), "--max-lora-rank", str(lora.max_rank)]
    if lora.max_cpu_loras is not None:
        found += ["--max-cpu-loras", str(lora.max_cpu_loras)]
    if lora.adapters:
        found += ["--lora-modules", *(f"{adapter.name}={adapter.path}" for adapter in lora.adapters)]
    return found
