"""All flags of `model-server serve`, and the settings that they become. This module also defines the flags of
serving itself. The other modules of the package define the other flags. Caller: the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model_server.core.request import Adapter
from model_server.serve_flags import backends, beyond, cache
from model_server.serve_flags.argument import Group, choice, switch, value
from model_server.server.models import DEFAULT_MAX_ADAPTERS
from model_server.server.serve import ServerSettings
from model_server.weights.known import SMOLLM2


def add_flags(run: argparse.ArgumentParser) -> None:
    serving = run.add_argument_group("serving")
    _add_serving(serving)
    _add_bounds(serving)
    cache.add_groups(run)
    beyond.add_groups(run)
    backends.add_groups(run)


def settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings that the flags describe. Raise ValueError if a flag has an invalid value, or
    --cost cannot be read.
    """
    _check(args)
    return ServerSettings(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        model=args.model or ("made-up" if args.runner == "cost" else SMOLLM2),
        served_names=tuple(args.served_model_name),
        adapters=tuple(_adapter(text) for text in args.lora),
        max_adapters=args.max_adapters,
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
        num_blocks=args.num_blocks,
        block_size_tokens=args.block_size,
        enable_prefix_caching=not args.no_prefix_caching,
        max_model_len_tokens=args.max_model_len,
        limits=cache.limits(args),
        backend=backends.backend(args),
        prompt_cache_entries=args.prompt_cache_size,
        cache=cache.options(args),
        kv_events=beyond.kv_events(args),
        kv_store=beyond.kv_store(args),
        kv_transfer=beyond.kv_transfer(args),
        max_waiting=args.max_queue,
        stream_interval=args.stream_interval,
        drain_timeout_s=args.drain_timeout_s,
        max_body_bytes=args.max_body_bytes,
    )


def _check(args: argparse.Namespace) -> None:
    for flag, number in (
        ("--max-queue", args.max_queue),
        ("--stream-interval", args.stream_interval),
        ("--max-body-bytes", args.max_body_bytes),
        ("--max-adapters", args.max_adapters),
        ("--num-blocks", args.num_blocks),
        ("--max-model-len", args.max_model_len),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} must be at least 1")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} is not a port")
    if args.port_file is not None and not args.port_file.absolute().parent.is_dir():
        raise ValueError(
            f"--port-file {args.port_file}: there is no folder {args.port_file.absolute().parent}"
        )
    if not args.drain_timeout_s >= 0:
        raise ValueError("--drain-timeout-s must not be negative")


def _add_serving(group: Group) -> None:
    value(group, "--host", "ADDRESS", "address to bind", default="127.0.0.1")
    value(group, "--port", "N", "port to listen on; 0 takes a free port", default=8000)
    value(
        group,
        "--port-file",
        "PATH",
        "write the port's number to this file once the server listens",
        kind=Path,
    )
    choice(group, "--runner", ("cost", "hf"), "what computes the answers")
    value(
        group,
        "--model",
        "NAME",
        "with --runner cost, any name (default made-up); with --runner hf, a model's folder or smollm2 (default smollm2)",
        kind=str,
    )
    repeated = (
        (
            "--served-model-name",
            "NAME",
            "name that requests use instead of --model; repeat the flag for several names; the first name is the label in the metrics",
        ),
        (
            "--lora",
            "NAME[=PATH]",
            "LoRA adapter that the server loads at its start; repeat the flag for several adapters",
        ),
    )
    for flag, unit, meaning in repeated:
        group.add_argument(flag, action="append", default=[], metavar=unit, help=meaning)
    switch(
        group,
        "--allow-runtime-lora-updating",
        "let clients load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM does with "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING (default: these paths answer 404)",
    )


def _add_bounds(group: Group) -> None:
    for flag, unit, meaning, default in (
        ("--max-adapters", "N", "largest number of adapters that are loaded at the same time", DEFAULT_MAX_ADAPTERS),
        ("--max-queue", "N", "largest number of requests that wait; further requests get 429", 1024),
        ("--stream-interval", "N", "tokens in each event of a streamed answer; the first event always has one token", 1),
        ("--max-body-bytes", "N", "longest body of a request; a longer body gets 413", 64 * 1024 * 1024),
        ("--drain-timeout-s", "S", "after SIGTERM, the time that running requests have to finish, in seconds", 30.0),
    ):  # fmt: skip
        value(group, flag, unit, meaning, default=default)


def _adapter(text: str) -> Adapter:
    name, _, path = text.partition("=")
    if not name:
        raise ValueError(f"--lora {text!r}: an adapter needs a name")
    return Adapter(name, path)
