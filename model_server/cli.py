"""The command `model-server`: flags to settings, one message for each mistake, exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.runners.hf.errors import ModelError
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS, CostSettings, HfSettings
from model_server.server.errors import ApiError
from model_server.server.kv_events import DEFAULT_BUFFER_BATCHES
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.serve import ServerSettings, serve
from model_server.sync import command as lora_sync
from model_server.vllm import command as vllm_profile
from model_server.weights.errors import WeightsError
from model_server.weights.known import SMOLLM2, find

_ABOUT = """\
An OpenAI-compatible model server. Block pool, chained block hashes, continuous batching and preemption
work as in vLLM, under vLLM's metric names. Who computes is --runner's choice:
  cost  nobody: the time a step takes comes from a cost model, and the words of the answers are made up
        (the same prompt always gets the same answer). Needs neither torch nor a GPU; shows what a
        gateway's routing gains.
  hf    a real model of the Llama, Qwen, GPT-2 or OPT family, through transformers, on CPU or CUDA.
        Needs the extra: pip install 'prefix-gateway[engine]'
"""

_EXAMPLES = """\
examples:
  model-server serve --port 8000 --model demo
      then: curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "Hello"}'
  model-server serve --port 0 --port-file port.txt --lora style --lora law=/adapters/law --max-loras 2
      any free port, written to port.txt; two LoRA adapters, both of which fit in one batch
  model-server serve --num-blocks 512 --prefill-tokens-per-s 2000 --decode-step-ms 40
      a small, slow card: 8,192 tokens of cache, half a second for 1,000 prompt tokens
  model-server serve --speed 10
      everything ten times as fast as the costs say
  model-server serve --runner hf --model smollm2
      SmolLM2-135M-Instruct on the CPU; the first time fetches 93 MB and converts them, a minute or two
  model-server serve --runner hf --model /models/qwen --device cuda --num-blocks 8192
      any folder with config.json, *.safetensors and tokenizer.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 0: ended by a signal after draining; 2: settings that make no sense; 1: the port is taken."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    return command(args)


def _serve(args: argparse.Namespace) -> int:
    try:
        uvloop.run(serve(_settings(args), announce=_say))
    except (ValueError, ApiError, ModelError, WeightsError) as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the second Ctrl-C, while draining
        return 130
    return 0


def _fetch(args: argparse.Namespace) -> int:
    try:
        print(find(args.model, progress=_say))
    except WeightsError as error:
        print(f"model-server: {error}", file=sys.stderr)
        return 2
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="model-server",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "serve",
        help="serve until a signal comes (model-server serve --help lists the settings)",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(run=_serve)
    fetch = commands.add_parser(
        "fetch",
        help="fetch and convert a model that is known by name now, not when a server first wants it",
        description="Fetch and convert a model into the cache, and print the folder it is in.",
    )
    fetch.set_defaults(run=_fetch)
    fetch.add_argument("model", metavar="MODEL", help="smollm2 (93 MB to fetch, 275 MB converted)")
    profile = commands.add_parser(
        "profile",
        help="from one YAML file, how to start real vLLM pods that can be routed to; refuses what breaks routing",
        description=vllm_profile.__doc__,
    )
    profile.set_defaults(run=vllm_profile.run)
    vllm_profile.add_flags(profile)
    sync = commands.add_parser(
        "lora-sync",
        help="a sidecar that makes a server's LoRA adapters equal a file",
        description=lora_sync.__doc__,
    )
    sync.set_defaults(run=lora_sync.run)
    lora_sync.add_flags(sync)
    _add_serving(run.add_argument_group("serving"))
    _add_cache(run.add_argument_group("cache and batch"))
    _add_kv_events(run.add_argument_group("KV events", "what the cache holds, over ZeroMQ, as vLLM sends it"))
    _add_hf(run.add_argument_group("real model", "with --runner hf"))
    _add_costs(run.add_argument_group("costs", "with --runner cost: how long steps take, before --speed"))
    return parser


def _add_serving(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    group.add_argument("--port-file", type=Path, metavar="PATH", help="write the port here once listening")
    group.add_argument(
        "--runner", choices=("cost", "hf"), default="cost", help="who computes (default %(default)s)"
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="with --runner cost any name (default made-up); with hf a folder, or smollm2 (the default)",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name that requests use instead of --model; may be repeated, the first is the metrics' label",
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="LoRA adapter served from the start; may be repeated. More at run time: /v1/load_lora_adapter",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; further ones get 429 (default %(default)s)",
    )
    group.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        metavar="N",
        help="tokens in one event of a streamed answer; the first always comes alone (default %(default)s)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=64 * 1024 * 1024,
        metavar="N",
        help="larger requests get 413 (default %(default)s)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="S",
        help="on SIGTERM, how long requests under way may take to finish (default %(default)s)",
    )


def _add_kv_events(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-events-endpoint",
        metavar="ADDRESS",
        help="publish KV events here: tcp://*:5557, for example (default: publish none)",
    )
    group.add_argument(
        "--kv-events-replay-endpoint",
        metavar="ADDRESS",
        help="answer subscribers here that ask for what they missed",
    )
    group.add_argument("--kv-events-topic", default="", metavar="TEXT", help="first frame of each message")
    group.add_argument(
        "--kv-events-buffer",
        type=int,
        default=DEFAULT_BUFFER_BATCHES,
        metavar="N",
        help="messages kept for replay, of about 20 KB after 2,048 new tokens (default %(default)s)",
    )
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGORITHMS,
        default="sha256",
        help="how blocks are named; the first two as in vLLM (default %(default)s)",
    )
    group.add_argument(
        "--hash-seed",
        default=DEFAULT_SEED,
        metavar="TEXT",
        help="what the chain of hashes starts from, PYTHONHASHSEED in vLLM (default %(default)s)",
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens in a block (default %(default)s)"
    )
    group.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help=f"blocks in the KV cache (default {DEFAULT_COST_BLOCKS}; {DEFAULT_HF_BLOCKS} with --runner hf, where they take memory)",
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its start")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt plus answer, in tokens (default: what the cache holds and the model allows)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="requests in one batch (default %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens computed in one step; longer prompts take several (default %(default)s)",
    )
    group.add_argument(
        "--max-loras",
        type=int,
        default=4,
        metavar="N",
        help="different adapters in one batch (default %(default)s)",
    )


def _add_hf(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:1 ... (default auto: a GPU where torch sees one)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of weights and cache (default auto: float32 on a CPU, bfloat16 on a GPU)",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of torch on a CPU; engines that share cores want one each (default: half of the cores)",
    )


def _add_costs(group: argparse._ArgumentGroup) -> None:
    costs = CostModel()
    group.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=costs.prefill_tokens_per_s,
        metavar="N",
        help="at the start of a prompt (default %(default)s)",
    )
    group.add_argument(
        "--context-knee-tokens",
        type=float,
        default=costs.context_knee_tokens,
        metavar="N",
        help="prefill takes twice as long this far into a prompt (default %(default)s)",
    )
    group.add_argument(
        "--decode-step-ms",
        type=float,
        default=costs.decode_step_s * 1e3,
        metavar="MS",
        help="a step that decodes one request (default %(default)s)",
    )
    group.add_argument(
        "--decode-per-request-ms",
        type=float,
        default=costs.decode_per_request_s * 1e3,
        metavar="MS",
        help="what each further request adds (default %(default)s)",
    )
    group.add_argument(
        "--interference",
        type=float,
        default=costs.interference,
        metavar="X",
        help="share by which prefill is dearer beside decoding (default %(default)s)",
    )
    group.add_argument(
        "--lora-load-ms",
        type=float,
        default=costs.lora_load_s * 1e3,
        metavar="MS",
        help="bringing in an adapter (default %(default)s)",
    )
    group.add_argument(
        "--answer-tokens",
        type=int,
        default=128,
        metavar="N",
        help="mean length of an answer that nothing cuts (default %(default)s)",
    )
    group.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="divide all durations by this (default %(default)s)",
    )


def _settings(args: argparse.Namespace) -> ServerSettings:
    for flag, value in (
        ("--max-queue", args.max_queue),
        ("--stream-interval", args.stream_interval),
        ("--max-body-bytes", args.max_body_bytes),
    ):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} is not a port")
    if not args.drain_timeout_s >= 0:
        raise ValueError("--drain-timeout-s must not be negative")
    return ServerSettings(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        model=args.model or ("made-up" if args.runner == "cost" else SMOLLM2),
        served_names=tuple(args.served_model_name),
        adapters=tuple(_adapter(text) for text in args.lora),
        num_blocks=args.num_blocks,
        block_size_tokens=args.block_size,
        enable_prefix_caching=not args.no_prefix_caching,
        max_model_len_tokens=args.max_model_len,
        limits=SchedulerLimits(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_loras=args.max_loras,
        ),
        backend=_cost_settings(args) if args.runner == "cost" else _hf_settings(args),
        cache=CacheOptions(hash_algorithm=args.prefix_caching_hash_algo, hash_seed=args.hash_seed),
        kv_events=_kv_events(args),
        max_waiting=args.max_queue,
        stream_interval=args.stream_interval,
        drain_timeout_s=args.drain_timeout_s,
        max_body_bytes=args.max_body_bytes,
    )


def _cost_settings(args: argparse.Namespace) -> CostSettings:
    costs = CostModel(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        context_knee_tokens=args.context_knee_tokens,
        decode_step_s=args.decode_step_ms / 1e3,
        decode_per_request_s=args.decode_per_request_ms / 1e3,
        interference=args.interference,
        lora_load_s=args.lora_load_ms / 1e3,
        speed=args.speed,
    )
    return CostSettings(costs=costs, mean_answer_tokens=args.answer_tokens)


def _hf_settings(args: argparse.Namespace) -> HfSettings:
    if args.threads is not None and args.threads < 1:
        raise ValueError("--threads must be at least 1")
    return HfSettings(device=args.device, dtype=args.dtype, threads=args.threads)


def _kv_events(args: argparse.Namespace) -> KvEventSettings | None:
    if args.kv_events_endpoint is None:
        if args.kv_events_replay_endpoint is not None:
            raise ValueError("--kv-events-replay-endpoint replays events of --kv-events-endpoint: give both")
        return None
    return KvEventSettings(
        endpoint=args.kv_events_endpoint,
        replay_endpoint=args.kv_events_replay_endpoint,
        topic=args.kv_events_topic,
        buffer_batches=args.kv_events_buffer,
    )


def _adapter(text: str) -> Adapter:
    name, _, path = text.partition("=")
    if not name:
        raise ValueError(f"--lora {text!r}: an adapter needs a name")
    return Adapter(name, path)
