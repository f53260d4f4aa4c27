"""`model-server profile`: reads a launch profile, refuses settings that break routing, and prints the
arguments that start vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from model_server.pods.vllm.checks import require_sound
from model_server.pods.vllm.errors import ProfileError
from model_server.pods.vllm.profile import (
    Profile,
    arguments,
    environment,
    of_pool,
    pod_patch,
    read,
    shell_line,
    shell_variables,
)

OUTPUTS = ("check", "args", "env", "pod-patch")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, required=True, metavar="PATH", help="the profile, a YAML file")
    parser.add_argument(
        "--output",
        choices=OUTPUTS,
        default="check",
        help="what to print. check: only whether the profile is valid; args: the arguments after `vllm serve`, quoted for a shell; "
        "env: lines NAME=value; pod-patch: a strategic merge patch (default %(default)s)",
    )
    parser.add_argument("--pool", metavar="NAME", help="the pool to print; needed if the profile has pools")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the profile is sound, 2 if it is not (stderr says what to write instead), 1 if the file
    cannot be read.
    """
    try:
        profile = read(args.file.read_bytes())
        require_sound(profile)
        if args.output == "check":
            print(_summary(profile))
        else:
            sys.stdout.write(_rendered(_chosen(profile, args.pool), args.output))
    except ProfileError as error:
        for problem in error.problems:
            print(f"{args.file}: {problem}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 1
    return 0


def _chosen(profile: Profile, pool: str | None) -> Profile:
    names = ", ".join(pool.name for pool in profile.pools)
    if pool is None:
        if profile.pools:
            raise ValueError(f"the profile has pools; choose one with --pool: {names}")
        return profile
    try:
        return of_pool(profile, pool)
    except KeyError:
        raise ValueError(f"there is no pool {pool!r}; the pools are: {names or 'none'}") from None


def _rendered(profile: Profile, output: str) -> str:
    match output:
        case "args":
            return shell_line(arguments(profile)) + "\n"
        case "env":
            return shell_variables(environment(profile))
        case _:
            return yaml.safe_dump(pod_patch(profile), sort_keys=False, width=1000)


def _summary(profile: Profile) -> str:
    parts = [f"{profile.model} on port {profile.port}"]
    if profile.kv_events is not None:
        # The checks have refused pools that differ in these settings.
        own = of_pool(profile, profile.pools[0].name) if profile.pools else profile
        seed, size = own.hash_seed, own.block_size_tokens
        parts.append(
            f"KV events at {profile.kv_events.endpoint} ({own.hash_algorithm}, seed {seed}, blocks of {size})"
        )
    if profile.lora is not None:
        updates = ", more at run time" if profile.lora.runtime_updates else ""
        parts.append(f"{len(profile.lora.adapters)} LoRA adapters{updates}")
    if profile.pools:
        parts.append("pools: " + ", ".join(pool.name for pool in profile.pools))
    return "sound: " + "; ".join(parts)
