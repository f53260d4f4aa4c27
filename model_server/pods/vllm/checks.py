"""Checks a launch profile for settings that would break routing without any error.

Each check tests one thing and yields problems. `problems` runs all checks, so that a profile can be corrected
in one go. The rules are those of vLLM 0.32. Caller: the command `model-server profile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from model_server.pods.vllm.errors import Problem, ProfileError
from model_server.pods.vllm.profile import (
    DEFAULT_EVENTS_ENDPOINT,
    OFFLOAD_POLICIES,
    KvEvents,
    Profile,
    of_pool,
    tcp_port,
)

HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_PICKLED = "It hashes Python's pickle, which another program cannot compute reliably."
_FORGEABLE = "It is not a cryptographic hash, so a tenant can make collisions on purpose."
_UNSUITABLE_HASHES = {
    "sha256": _PICKLED,
    "xxhash": f"{_PICKLED} {_FORGEABLE}",
    "xxhash_cbor": _FORGEABLE,
}
"""For each hash algorithm that exact routing must not use, the reason."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_OWN_FLAGS = {
    "--model": "model",
    "--served-model-name": "servedNames",
    "--port": "port",
    "--max-model-len": "maxModelLenTokens",
    "--block-size": "blockSizeTokens",
    "--enable-prefix-caching": "prefixCaching",
    "--no-enable-prefix-caching": "prefixCaching",
    "--prefix-caching-hash-algo": "hashAlgorithm",
    "--enable-prompt-tokens-details": "no flag, because it is always on.",
    "--no-enable-prompt-tokens-details": "no flag, because it is always on.",
    "--kv-events-config": "kvEvents",
    "--enable-lora": "lora",
    "--no-enable-lora": "lora",
    "--max-loras": "lora.maxLoras",
    "--max-lora-rank": "lora.maxRank",
    "--max-cpu-loras": "lora.maxCpuLoras",
    "--lora-modules": "lora.adapters",
}
_CONNECTOR_FLAGS = frozenset({"--kv-transfer-config", "--kv-offloading-size"})
"""`kvOffload` configures one connector. The user may choose others with these flags."""
_OWN_VARIABLES = {
    "PYTHONHASHSEED": "hashSeed",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lora.runtimeUpdates",
}


def problems(profile: Profile) -> list[Problem]:
    """Return all problems, in the order of the checks. Without problems, the gateway can route to pods that
    are started from this profile.
    """
    return [problem for check in _CHECKS for problem in check(profile)]


def require_sound(profile: Profile) -> None:
    """Raise ProfileError with every problem."""
    if found := problems(profile):
        raise ProfileError(found)


def _names(profile: Profile) -> Iterator[Problem]:
    for field, value in (("model", profile.model), ("container", profile.container)):
        if not value or value.startswith("-"):
            yield Problem(field, f"{value!r} is not a name.", f"a {field}'s name.")
    if any(not name or name.startswith("-") for name in profile.served_names):
        yield Problem(
            "servedNames", "A name is empty, or looks like a flag.", "names that do not begin with '-'."
        )
    yield from _repeated("servedNames", profile.served_names)
    yield from _repeated("pools", [pool.name for pool in profile.pools])


def _ports(profile: Profile) -> Iterator[Problem]:
    events = profile.kv_events
    used = {"port": profile.port}
    if events is not None:
        for field, address in _addresses(events):
            number = tcp_port(address)
            if number is not None:
                used[field] = number
    for field, number in used.items():
        if not 1 <= number <= 65535:
            yield Problem(
                field, f"Port {number} is not known before the pod runs.", "a port from 1 to 65535."
            )
    for number, count in Counter(used.values()).items():
        if count > 1:
            fields = " and ".join(field for field, port in used.items() if port == number)
            yield Problem(
                fields, f"All of these use port {number}, so vLLM would not start.", "different ports."
            )


def _prefix_cache(profile: Profile) -> Iterator[Problem]:
    if not profile.prefix_caching:
        yield Problem(
            "prefixCaching",
            "Without a prefix cache no pod is better than another for any prompt, but the gateway would still "
            "choose pods by caches that do not exist.",
            "true, or the policy rule least-load and no profile.",
        )
    for pool, own in _each_pool(profile):
        if own.hash_algorithm not in HASH_ALGORITHMS:
            yield Problem(
                f"{pool}hashAlgorithm",
                f"vLLM does not know the hash algorithm {own.hash_algorithm!r}.",
                f"one of {', '.join(HASH_ALGORITHMS)}.",
            )
        if own.block_size_tokens is not None and own.block_size_tokens < 1:
            yield Problem(f"{pool}blockSizeTokens", "A block holds at least one token.", "16, for example.")
        if own.hash_seed is not None and not 0 <= own.hash_seed < 2**32:
            yield Problem(
                f"{pool}hashSeed", "Python does not start with this PYTHONHASHSEED.", "0 to 4294967295."
            )


def _block_hash_settings(profile: Profile) -> Iterator[Problem]:
    """Check the settings that decide block hashes. A reader can use block hashes only if all pods and the
    reader have the same settings.
    """
    if profile.kv_events is None:
        return
    settings = list(_each_pool(profile))
    seeds = {own.hash_seed for _, own in settings}
    if None in seeds:
        unset = ", ".join(f"{pool}hashSeed" for pool, own in settings if own.hash_seed is None)
        yield Problem(
            unset,
            "KV events name blocks by hashes that start from PYTHONHASHSEED. If it is not set, the start is fixed "
            "in vLLM 0.32, but random in older releases and with xxhash. A base image may also set another value.",
            "hashSeed: 0, and the same number in the reader of the events.",
        )
    for field, values in (
        ("hashSeed", seeds - {None}),
        ("hashAlgorithm", {own.hash_algorithm for _, own in settings}),
        ("blockSizeTokens", {own.block_size_tokens for _, own in settings} - {None}),
    ):
        if len(values) > 1:
            yield Problem(
                f"pools: {field}",
                f"Pods differ ({', '.join(sorted(map(str, values)))}), so the same prompt has different block hashes "
                "on them, and a match on one pod says nothing about another pod.",
                f"one {field}, at the top of the profile.",
            )
    if any(own.block_size_tokens is None for _, own in settings):
        yield Problem(
            "blockSizeTokens",
            "vLLM picks a block size by platform and model, and the reader of KV events must know it beforehand.",
            "the number of tokens, which is 16 on most GPUs.",
        )


def _exact_routing(profile: Profile) -> Iterator[Problem]:
    if not profile.exact_routing:
        return
    if profile.kv_events is None:
        yield Problem(
            "exactRouting", "Exact routing follows KV events, but the pods publish none.", "kvEvents: {}."
        )
    for pool, own in _each_pool(profile):
        if own.hash_algorithm in _UNSUITABLE_HASHES:
            yield Problem(
                f"{pool}hashAlgorithm",
                _UNSUITABLE_HASHES[own.hash_algorithm],
                "sha256_cbor.",
            )


def _events_addresses(profile: Profile) -> Iterator[Problem]:
    if profile.kv_events is None:
        return
    for field, address in _addresses(profile.kv_events):
        if address.startswith("ipc://") and len(address) > len("ipc://"):
            continue  # This case is a reader in the same pod.
        if tcp_port(address) is None:
            yield Problem(
                field,
                f"{address!r} is not an address that vLLM could bind.",
                f"{DEFAULT_EVENTS_ENDPOINT}, or ipc://PATH for a reader in the same pod.",
            )
        elif not address.startswith("tcp://*:"):
            yield Problem(
                field,
                f"vLLM binds an address for events only if it contains '*', and would connect to {address} instead. A "
                "replay address without '*' is bound, but other pods cannot reach it.",
                f"tcp://*:{tcp_port(address)}.",
            )


def _kv_offload(profile: Profile) -> Iterator[Problem]:
    offload = profile.kv_offload
    if offload is None:
        return
    if offload.memory_bytes < 1:
        yield Problem(
            "kvOffload.memoryBytes",
            "vLLM does not start without memory for the offload.",
            "a number of bytes.",
        )
    if offload.policy not in OFFLOAD_POLICIES:
        yield Problem(
            "kvOffload.policy",
            f"vLLM does not know {offload.policy!r} and would not start.",
            "lru, arc or uses.",
        )
    given = [*profile.extra_args, *(arg for pool in profile.pools for arg in pool.extra_args)]
    for flag in _CONNECTOR_FLAGS & {_flag_of(arg) for arg in given}:
        yield Problem(
            "extraArgs", f"{flag} would replace what kvOffload writes.", "kvOffload or the flag, not both."
        )


def _lora(profile: Profile) -> Iterator[Problem]:
    lora = profile.lora
    if lora is None:
        return
    if lora.max_loras < 1:
        some = f"{len(lora.adapters)} adapters are listed, and n" if lora.adapters else "N"
        yield Problem(
            "lora.maxLoras",
            f"{some}o request for an adapter could ever run.",
            "at least 1, or no lora at all.",
        )
    if lora.max_rank not in LORA_RANKS:
        ranks = ", ".join(map(str, LORA_RANKS))
        yield Problem(
            "lora.maxRank", f"vLLM does not start with a maximum rank of {lora.max_rank}.", f"one of {ranks}."
        )
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        yield Problem(
            "lora.maxCpuLoras",
            "It is less than lora.maxLoras, so vLLM does not start.",
            "at least lora.maxLoras, or no maxCpuLoras.",
        )
    yield from _repeated("lora.adapters", [adapter.name for adapter in lora.adapters])
    for index, adapter in enumerate(lora.adapters):
        where = f"lora.adapters[{index}]"
        if not adapter.name or "=" in adapter.name or adapter.name.startswith("-"):
            yield Problem(
                f"{where}.name", f"{adapter.name!r} cannot be passed to vLLM.", "letters and digits."
            )
        if adapter.name in profile.names:
            yield Problem(
                f"{where}.name",
                "Requests for the model would get the adapter, or requests for the adapter would get the model.",
                "another name.",
            )
        if not adapter.path.startswith("/"):
            yield Problem(
                f"{where}.path",
                "The path is part of the adapter's block hashes and depends on where vLLM is started.",
                "an absolute path, the same in all pods.",
            )


def _extras(profile: Profile) -> Iterator[Problem]:
    yield from _extra(profile.extra_args, profile.extra_env, where="")
    for pool in profile.pools:
        yield from _extra(pool.extra_args, pool.extra_env, where=f"pools.{pool.name}.")


def _extra(args: Sequence[str], env: Mapping[str, str], *, where: str) -> Iterator[Problem]:
    for arg in args:
        flag = _flag_of(arg)
        if flag in _OWN_FLAGS:
            yield Problem(
                f"{where}extraArgs",
                f"The profile itself writes {flag}, and a value in extraArgs would not be checked.",
                _OWN_FLAGS[flag],
            )
        if flag == "--disable-log-stats":
            yield Problem(
                f"{where}extraArgs",
                "Without stats, /metrics shows no load and no cache, so the picker always sees an idle server.",
                "leave it out.",
            )
    for name in env.keys() & _OWN_VARIABLES.keys():
        yield Problem(
            f"{where}extraEnv",
            f"The profile itself writes {name}, and a value in extraEnv would not be checked.",
            _OWN_VARIABLES[name],
        )


def _flag_of(arg: str) -> str:
    """Return the flag without its value, and without a path inside the value: vLLM also accepts
    `--kv-events-config.endpoint=...`.
    """
    return arg.partition("=")[0].partition(".")[0].replace("_", "-")


def _each_pool(profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Yield for each pool the beginning of its fields' names, and its settings. Without pools, yield the
    profile itself.
    """
    if not profile.pools:
        yield "", profile
    for pool in profile.pools:
        yield f"pools.{pool.name}.", of_pool(profile, pool.name)


def _addresses(events: KvEvents) -> Iterator[tuple[str, str]]:
    yield "kvEvents.endpoint", events.endpoint
    if events.replay_endpoint is not None:
        yield "kvEvents.replayEndpoint", events.replay_endpoint


def _repeated(field: str, names: Sequence[str]) -> Iterator[Problem]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(field, f"{name!r} is listed {count} times.", "each name once.")


_CHECKS: tuple[Callable[[Profile], Iterator[Problem]], ...] = (
    _names,
    _ports,
    _prefix_cache,
    _block_hash_settings,
    _exact_routing,
    _events_addresses,
    _kv_offload,
    _lora,
    _extras,
)
