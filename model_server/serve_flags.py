"""The flags of `model-server serve`: what may be set, said once, and turned into settings. Caller: the command line."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from model_server.calibrate.cost_file import read_costs
from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import EVICTION_NAMES, QUEUES
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS, CostSettings, HfSettings
from model_server.server.kv_events import DEFAULT_BUFFER_BATCHES
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.serve import ServerSettings
from model_server.tiers.settings import FEW_CHUNKS, KvStoreSettings
from model_server.weights.known import SMOLLM2


def add_flags(run: argparse.ArgumentParser) -> None:
    _add_serving(run.add_argument_group("serving"))
    _add_cache(run.add_argument_group("cache and batch"))
    _add_cache_policy(
        run.add_argument_group(
            "cache policy", "how the prefix cache finds and forgets; the defaults are vLLM's"
        )
    )
    _add_kv_store(
        run.add_argument_group(
            "KV store", "with --runner hf: prefixes beyond the KV cache, in main memory and on disk"
        )
    )
    _add_kv_events(run.add_argument_group("KV events", "what the cache holds, over ZeroMQ, as vLLM sends it"))
    _add_hf(run.add_argument_group("real model", "with --runner hf"))
    _add_costs(run.add_argument_group("costs", "with --runner cost: how long steps take, before --speed"))


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


def _add_cache_policy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGORITHMS,
        default="sha256",
        help="how blocks are named: sha256 and sha256_cbor as in vLLM; xxh3 is faster and can be forged (default %(default)s)",
    )
    group.add_argument(
        "--hash-seed",
        default=DEFAULT_SEED,
        metavar="TEXT",
        help="what the chain of hashes starts from, PYTHONHASHSEED in vLLM; servers whose events are compared need the same "
        "(default %(default)s)",
    )
    group.add_argument(
        "--eviction",
        choices=EVICTION_NAMES,
        default="lru",
        help="what goes first of what nobody uses: lru, what was let go of first; last-touch, the same with ties broken by the "
        "longest prefix; lfu, what was used least often (default %(default)s)",
    )
    group.add_argument(
        "--free-queue",
        choices=tuple(QUEUES),
        default="linked",
        help="how lru keeps its order: a linked list, or two variants with removals put off, for comparison "
        "(default %(default)s)",
    )
    group.add_argument(
        "--partial-blocks",
        action="store_true",
        help="find blocks that are not full too, token by token: prompts shorter than a block are hits, others hit a little "
        "more; not with KV events, which name full blocks",
    )
    group.add_argument(
        "--max-unused-blocks",
        type=int,
        metavar="N",
        help="keep the content of at most so many blocks that no request holds (default: of all)",
    )
    group.add_argument(
        "--prompt-cache-size",
        type=int,
        default=0,
        metavar="N",
        help="keep so many whole prompts with the logits after them: the same prompt again is answered without computing any "
        "of it, and its blocks, a tail that is not full included, stay until others need them (default %(default)s: none)",
    )
    group.add_argument(
        "--preallocated-blocks",
        type=int,
        default=0,
        metavar="N",
        help="spare blocks that a request takes with each new one, while there are free ones (default %(default)s)",
    )


def _add_kv_store(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-store",
        type=Path,
        metavar="DIR",
        help="store the KV of every computed prefix here, and load it where the cache has lost it (default: no store)",
    )
    group.add_argument(
        "--kv-store-size", type=float, default=20.0, metavar="GB", help="most on disk (default %(default)s)"
    )
    group.add_argument(
        "--kv-store-cpu-size",
        type=float,
        default=1.0,
        metavar="GB",
        help="main memory for parts of it that are used often (default %(default)s)",
    )
    group.add_argument(
        "--kv-store-device-size",
        type=float,
        default=0.0,
        metavar="GB",
        help="memory of the model's device for them, beside --num-blocks; with a ratio under 1 (default %(default)s)",
    )
    group.add_argument(
        "--kv-store-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help="1: load stored prefixes whole, answers are exact; 0.5: read only the half of their tokens that matters most to the "
        "request, answers are approximate (default %(default)s)",
    )
    group.add_argument(
        "--kv-store-chunk-share",
        type=float,
        default=FEW_CHUNKS,
        metavar="S",
        help="with a ratio under 1, read only the chunks on disk that hold this share of the chosen tokens' weight, and as many tokens "
        "from them; 1 reads each chunk that holds a chosen token (default %(default)s)",
    )
    group.add_argument(
        "--kv-store-reorder-share",
        type=float,
        default=0.05,
        metavar="S",
        help="with a ratio under 1, the share of the time in which important tokens are packed together on disk while requests "
        "are computed; 0 never does it (default %(default)s)",
    )


def _kv_store(args: argparse.Namespace) -> KvStoreSettings | None:
    if args.kv_store is None:
        return None
    return KvStoreSettings(
        folder=args.kv_store,
        size_bytes=int(args.kv_store_size * 1e9),
        cpu_bytes=int(args.kv_store_cpu_size * 1e9),
        device_bytes=int(args.kv_store_device_size * 1e9),
        ratio=args.kv_store_ratio,
        chunk_share=args.kv_store_chunk_share,
        reorder_share=args.kv_store_reorder_share,
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


_COST_FLAGS = (
    ("--prefill-tokens-per-s", "N", "prefill_tokens_per_s", 1.0, "at the start of a prompt"),
    (
        "--context-knee-tokens",
        "N",
        "context_knee_tokens",
        1.0,
        "prefill takes twice as long this far into a prompt",
    ),
    ("--decode-step-ms", "MS", "decode_step_s", 1e-3, "a step that decodes one request"),
    ("--decode-per-request-ms", "MS", "decode_per_request_s", 1e-3, "what each further request adds"),
    ("--interference", "X", "interference", 1.0, "share by which prefill is dearer beside decoding"),
    ("--lora-load-ms", "MS", "lora_load_s", 1e-3, "bringing in an adapter"),
    ("--speed", "FACTOR", "speed", 1.0, "divide all durations by this"),
)
"""Flag, its unit, the field of `CostModel`, what one of the flag's units is in the field's, and what it means."""


def _add_costs(group: argparse._ArgumentGroup) -> None:
    costs = CostModel()
    group.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="costs as `model-server calibrate` wrote them; the flags below go before it (default: an 8B model on one GPU)",
    )
    for flag, unit, name, factor, meaning in _COST_FLAGS:
        default = getattr(costs, name) / factor
        group.add_argument(
            flag,
            type=float,
            dest=name,
            metavar=unit,
            help=f"{meaning} (default {default:.10g}, or as in --cost)",
        )
    group.add_argument(
        "--answer-tokens",
        type=int,
        default=128,
        metavar="N",
        help="mean length of an answer that nothing cuts (default %(default)s)",
    )


def settings(args: argparse.Namespace) -> ServerSettings:
    """ValueError: a flag makes no sense, or --cost cannot be read."""
    for flag, value in (
        ("--max-queue", args.max_queue),
        ("--stream-interval", args.stream_interval),
        ("--max-body-bytes", args.max_body_bytes),
        ("--num-blocks", args.num_blocks),
        ("--max-model-len", args.max_model_len),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} is not a port")
    if args.port_file is not None and not args.port_file.absolute().parent.is_dir():
        raise ValueError(
            f"--port-file {args.port_file}: there is no folder {args.port_file.absolute().parent}"
        )
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
        prompt_cache_entries=args.prompt_cache_size,
        cache=CacheOptions(
            hash_algorithm=args.prefix_caching_hash_algo,
            hash_seed=args.hash_seed,
            eviction=args.eviction,
            free_queue=args.free_queue,
            max_unused_blocks=args.max_unused_blocks,
            preallocated_blocks=args.preallocated_blocks,
            partial_blocks=args.partial_blocks,
        ),
        kv_events=_kv_events(args),
        kv_store=_kv_store(args),
        max_waiting=args.max_queue,
        stream_interval=args.stream_interval,
        drain_timeout_s=args.drain_timeout_s,
        max_body_bytes=args.max_body_bytes,
    )


def _cost_settings(args: argparse.Namespace) -> CostSettings:
    given = {
        name: getattr(args, name) * factor
        for _, _, name, factor, _ in _COST_FLAGS
        if getattr(args, name) is not None
    }
    costs = replace(read_costs(args.cost) if args.cost is not None else CostModel(), **given)
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
