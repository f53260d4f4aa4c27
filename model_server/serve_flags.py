"""The flags of `model-server serve`, and the settings that they become. A flag sets one field of one settings
class, and has the field's type, choices and default. Caller: the command line.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from model_server.core.cache_options import CacheOptions
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS, CostSettings, HfSettings
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.remote_prefill import KvTransferSettings
from model_server.server.serve import ServerSettings
from model_server.tiers.settings import KvStoreSettings
from model_server.weights.known import SMOLLM2

Rows = Sequence[tuple[str, str, str, str]]
"""For each flag: its name, its unit, the field that it sets, and what it means."""

_UNITS = {"GB": 1e9, "MS": 1e-3}
"""The units of flags that are not the unit of the field, and the factor between the two."""

_SERVING: Rows = (
    ("--host", "ADDRESS", "host", "address to bind"),
    ("--port", "N", "port", "port to listen on; 0 takes a free port"),
    ("--port-file", "PATH", "port_file", "write the port's number to this file once the server listens"),
    ("--allow-runtime-lora-updating", "", "allow_runtime_lora_updating",
     ("let clients load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM does with "
     "VLLM_ALLOW_RUNTIME_LORA_UPDATING (default: these paths answer 404)")),
    ("--max-adapters", "N", "max_adapters", "largest number of adapters that are loaded at the same time"),
    ("--max-queue", "N", "max_waiting", "largest number of requests that wait; further requests get 429"),
    ("--stream-interval", "N", "stream_interval",
     "tokens in each event of a streamed answer; the first event always has one token"),
    ("--max-body-bytes", "N", "max_body_bytes", "longest body of a request; a longer body gets 413"),
    ("--drain-timeout-s", "S", "drain_timeout_s",
     "after SIGTERM, the time that running requests have to finish, in seconds"),
)  # fmt: skip

_SIZES: Rows = (
    ("--block-size", "N", "block_size_tokens", "tokens in a block"),
    ("--num-blocks", "N", "num_blocks",
     (f"blocks in the KV cache (default {DEFAULT_COST_BLOCKS}; {DEFAULT_HF_BLOCKS} with --runner hf, whose blocks "
     "take real memory)")),
    ("--no-prefix-caching", "", "enable_prefix_caching",
     "do not cache prefixes: compute every prompt from its first token"),
    ("--max-model-len", "N", "max_model_len_tokens",
     ("largest number of tokens of a prompt and its answer together (default: as many as the cache holds and the "
     "model allows)")),
)  # fmt: skip

_BATCH: Rows = (
    ("--max-num-seqs", "N", "max_num_seqs", "largest number of requests in one batch"),
    ("--max-num-batched-tokens", "N", "max_num_batched_tokens",
     "largest number of tokens that one step computes; a longer prompt takes several steps"),
    ("--max-loras", "N", "max_loras", "largest number of different adapters in one batch"),
)  # fmt: skip

_CACHE: Rows = (
    ("--prefix-caching-hash-algo", "", "hash_algorithm", "hash function of the block hashes, as in vLLM"),
    ("--hash-seed", "TEXT", "hash_seed",
     ("start of the chain of block hashes, as PYTHONHASHSEED in vLLM; give servers whose events are compared the "
     "same seed")),
    ("--eviction", "", "eviction",
     ("which unused block is evicted first. lru: the block that was freed first; last-touch: as lru, but of the "
     "blocks that were last used in the same step, the block with the longest prefix; lfu: the block that was used "
     "least often; lfu-ageing: as lfu, but old uses fade")),
    ("--partial-blocks", "", "partial_blocks",
     ("also reuse blocks that are not full, token by token: prompts shorter than a block then hit, and longer "
     "prompts hit a little more; not possible with KV events, since those name full blocks only")),
    ("--max-unused-blocks", "N", "max_unused_blocks",
     "keep the content of at most N blocks that no request uses (default: keep the content of all such blocks)"),
    ("--preallocated-blocks", "N", "preallocated_blocks",
     "spare blocks that a request takes together with each new block, while blocks are free"),
)  # fmt: skip

_PROMPTS: Rows = (
    ("--prompt-cache-size", "N", "prompt_cache_entries",
     ("keep N whole prompts with the logits after their last token: the same prompt is then answered without any "
     "prefill; the prompt's blocks, its last and partly filled block included, stay until other requests need "
     "them; 0 keeps no prompt")),
)  # fmt: skip

_KV_STORE: Rows = (
    ("--kv-store", "DIR", "folder",
     ("folder of the store: the server stores the KV cache of every computed prefix in this folder, and loads a "
     "prefix from it when the cache has evicted the prefix (default: no store)")),
    ("--kv-store-size", "GB", "size_bytes", "largest size of the store on disk"),
    ("--kv-store-cpu-size", "GB", "cpu_bytes", "main memory for parts of the store that are used often"),
    ("--kv-store-device-size", "GB", "device_bytes",
     "memory of the model's device for such parts, in addition to --num-blocks; only with --kv-store-ratio under 1"),
    ("--kv-store-ratio", "R", "ratio",
     ("share of a stored prefix's tokens that is read. 1: the whole prefix is loaded, and answers are exact; 0.5: "
     "only the half of the tokens that matters most to the request is read, and answers are approximate")),
    ("--kv-store-score", "", "score",
     ("with --kv-store-ratio under 1: score of the chunks on disk that the fast tiers keep. uses: how often a chunk "
     "was read; importance: its important tokens; product: important tokens x uses")),
    ("--kv-store-probe-heads", "N", "probe_heads",
     "with --kv-store-ratio under 1: query heads that choose the tokens of a layer"),
    ("--kv-store-alpha", "A", "alpha",
     ("with --kv-store-ratio under 1: the heads of a layer must agree more than j ** A, where j is the agreement of "
     "random choices; otherwise the layer reads the whole prefix")),
    ("--kv-store-chunk-tokens", "N", "chunk_tokens", "tokens in a chunk on disk"),
    ("--kv-store-chunk-share", "S", "chunk_share",
     ("with --kv-store-ratio under 1: read only the chunks on disk that hold this share of the chosen tokens' "
     "weight, and replace the chosen tokens of other chunks by tokens from these chunks; 1 reads every chunk that "
     "holds a chosen token")),
)  # fmt: skip

_KV_TRANSFER: Rows = (
    ("--kv-transfer-bytes-per-token", "BYTES", "bytes_per_token", "size of one token's KV cache, in bytes"),
    ("--kv-transfer-rate", "BYTES", "bytes_per_second", "speed of a transfer, in bytes a second"),
)

_KV_EVENTS: Rows = (
    ("--kv-events-endpoint", "ADDRESS", "endpoint",
     "address to publish KV events at, for example tcp://*:5557 (default: publish none)"),
    ("--kv-events-replay-endpoint", "ADDRESS", "replay_endpoint",
     "address at which subscribers ask for events that they missed"),
    ("--kv-events-topic", "TEXT", "topic", "topic: the first frame of each message"),
    ("--kv-events-buffer", "N", "buffer_batches",
     "messages that are kept for replay; a message about 2,048 new tokens takes about 20 KB"),
)  # fmt: skip

_HF: Rows = (
    ("--device", "NAME", "device", "device of the model: cpu, cuda, cuda:1 ...; auto takes a GPU if torch finds one"),
    ("--dtype", "", "dtype", "number format of weights and cache; auto is float32 on a CPU, bfloat16 on a GPU"),
    ("--threads", "N", "threads",
     "torch's threads on a CPU; give engines that share cores one thread each (default: half of the cores)"),
)  # fmt: skip

_COSTS: Rows = (
    ("--prefill-tokens-per-s", "N", "prefill_tokens_per_s", "speed of prefill at the start of a prompt"),
    ("--context-knee-tokens", "N", "context_knee_tokens",
     "position in a prompt at which prefill takes twice as long for each token"),
    ("--decode-step-ms", "MS", "decode_step_s", "time of a step that decodes one request"),
    ("--decode-per-request-ms", "MS", "decode_per_request_s",
     "time that each further request adds to a step that decodes"),
    ("--interference", "X", "interference",
     "share of extra time that prefill takes in a step that also decodes"),
    ("--lora-load-ms", "MS", "lora_load_s", "time to load an adapter into a batch"),
    ("--speed", "FACTOR", "speed", "divide all durations by this factor"),
)  # fmt: skip

_ANSWERS: Rows = (
    ("--answer-tokens", "N", "mean_answer_tokens",
     "mean length of an answer that no limit cuts short, in tokens"),
)  # fmt: skip


def add_flags(run: argparse.ArgumentParser) -> None:
    serving = run.add_argument_group("serving")
    _add_names(serving)
    _add(serving, ServerSettings, _SERVING)
    size = run.add_argument_group("cache and batch")
    _add(size, ServerSettings, _SIZES)
    _add(size, SchedulerLimits, _BATCH)
    about = "how the prefix cache finds and evicts blocks; the defaults are vLLM's"
    policy = run.add_argument_group("cache policy", about)
    _add(policy, CacheOptions, _CACHE)
    _add(policy, ServerSettings, _PROMPTS)
    about = "with --runner hf: keeps prefixes that the KV cache has no room for, in main memory and on disk"
    _add(run.add_argument_group("KV store (experimental)", about), KvStoreSettings, _KV_STORE)
    about = "with --runner cost: other servers compute the prompts"
    apart = run.add_argument_group("prefill and decode apart", about)
    apart.add_argument(
        "--kv-transfer",
        action="store_true",
        help="obey the header x-prefiller-host-port: let the server at that address compute the prompt, and fetch the prompt's "
        "blocks from it; also hand out blocks to other servers. Use this only behind a gateway that removes the header "
        "from clients' requests",
    )
    _add(apart, KvTransferSettings, _KV_TRANSFER)
    about = "messages over ZeroMQ, in vLLM's format, about the blocks that the cache holds"
    _add(run.add_argument_group("KV events", about), KvEventSettings, _KV_EVENTS)
    _add(run.add_argument_group("real model", "with --runner hf"), HfSettings, _HF)
    about = "with --runner cost: the time that steps take; --speed divides all of these times"
    costs = run.add_argument_group("costs", about)
    of_file = "YAML file of costs, by the names of the flags below (costs: {decode_step_s: 0.02, ...}), which override the file (default: costs of an 8B model on one GPU)"
    costs.add_argument("--cost", type=Path, metavar="FILE", help=of_file)
    _add(costs, CostModel, _COSTS, otherwise=", or as in --cost")
    _add(costs, CostSettings, _ANSWERS)


def settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings that the flags describe. Raise ValueError if a flag has an invalid value, or
    --cost cannot be read.
    """
    found = ServerSettings(
        model=args.model or ("made-up" if args.runner == "cost" else SMOLLM2),
        served_names=tuple(args.served_model_name),
        adapters=tuple(_adapter(text) for text in args.lora),
        limits=SchedulerLimits(**_given(SchedulerLimits, args)),
        backend=_backend(args),
        cache=CacheOptions(**_given(CacheOptions, args)),
        kv_events=_kv_events(args),
        kv_store=KvStoreSettings(**stored) if "folder" in (stored := _given(KvStoreSettings, args)) else None,
        kv_transfer=KvTransferSettings(**_given(KvTransferSettings, args)) if args.kv_transfer else None,
        **_given(ServerSettings, args),
    )
    _check(found)
    return found


def _add(group: Any, kind: type, rows: Rows, *, otherwise: str = "") -> None:
    """Add the flags of one settings class. `otherwise` ends the text about their defaults."""
    types = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    for flag, unit, name, meaning in rows:
        default, dest, text = defaults[name], f"{kind.__name__}.{name}", meaning
        if types[name] is bool:
            action = "store_false" if default else "store_true"
            group.add_argument(flag, action=action, dest=dest, help=meaning)
            continue
        choices = get_args(types[name]) if get_origin(types[name]) is Literal else None
        factor = _UNITS.get(unit)
        if default not in (None, "", MISSING):
            shown = f"{default / (factor or 1):.10g}" if isinstance(default, int | float) else default
            text = f"{meaning} (default {shown}{otherwise})"
        read = str if choices else _reader(types[name], factor)
        group.add_argument(
            flag, type=read, choices=choices, dest=dest, metavar=None if choices else unit, help=text
        )


def _reader(hint: Any, factor: float | None) -> Callable[[str], Any]:
    """Return what reads a flag's text: the type itself, or a number in the flag's unit."""
    kind: Callable[[Any], Any] = next(one for one in get_args(hint) or (hint,) if one is not NoneType)
    if factor is None:
        return kind

    def number(text: str) -> Any:
        return kind(float(text) * factor)

    return number


def _add_names(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runner",
        choices=("cost", "hf"),
        default="cost",
        help="what computes the answers (default %(default)s)",
    )
    for flag, unit, meaning in (
        ("--model", "NAME",
         ("with --runner cost, any name (default made-up); with --runner hf, a model's folder or smollm2 (default "
         "smollm2)")),
        ("--served-model-name", "NAME",
         ("name that requests use instead of --model; repeat the flag for several names; the first name is the "
         "label in the metrics")),
        ("--lora", "NAME[=PATH]",
         "LoRA adapter that the server loads at its start; repeat the flag for several adapters"),
    ):  # fmt: skip
        many: dict[str, Any] = {} if flag == "--model" else {"action": "append", "default": []}
        group.add_argument(flag, metavar=unit, help=meaning, **many)


def _given(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a settings class that flags set."""
    dests = {f"{kind.__name__}.{field.name}": field.name for field in fields(kind)}
    return {dests[dest]: value for dest, value in vars(args).items() if dest in dests and value is not None}


def _backend(args: argparse.Namespace) -> CostSettings | HfSettings:
    if args.runner == "hf":
        return HfSettings(**_given(HfSettings, args))
    costs = CostModel() if args.cost is None else _read_costs(args.cost)
    return CostSettings(costs=replace(costs, **_given(CostModel, args)), **_given(CostSettings, args))


def _read_costs(path: Path) -> CostModel:
    """Return the costs in a file. Other fields than `costs`, which release 0.1 wrote, are not read."""
    try:
        file: dict[str, dict[str, float]] = yaml.safe_load(path.read_text())
        return CostModel(**file["costs"])
    except OSError as error:
        raise ValueError(f"the costs in {path} cannot be read: {error}") from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())  # YAML's own messages have several lines
        raise ValueError(f"{path} is not a file of costs: {why}") from error


def _kv_events(args: argparse.Namespace) -> KvEventSettings | None:
    found = _given(KvEventSettings, args)
    if "endpoint" not in found and "replay_endpoint" in found:
        raise ValueError("--kv-events-replay-endpoint replays events of --kv-events-endpoint: give both")
    return KvEventSettings(**found) if "endpoint" in found else None


def _adapter(text: str) -> Adapter:
    name, _, path = text.partition("=")
    if not name:
        raise ValueError(f"--lora {text!r}: an adapter needs a name")
    return Adapter(name, path)


def _check(found: ServerSettings) -> None:
    threads = found.backend.threads if isinstance(found.backend, HfSettings) else None
    for flag, number in (
        ("--max-queue", found.max_waiting),
        ("--stream-interval", found.stream_interval),
        ("--max-body-bytes", found.max_body_bytes),
        ("--max-adapters", found.max_adapters),
        ("--num-blocks", found.num_blocks),
        ("--max-model-len", found.max_model_len_tokens),
        ("--threads", threads),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} must be at least 1")
    if not 0 <= found.port <= 65535:
        raise ValueError(f"--port {found.port} is not a port")
    if found.port_file is not None and not found.port_file.absolute().parent.is_dir():
        folder = found.port_file.absolute().parent
        raise ValueError(f"--port-file {found.port_file}: there is no folder {folder}")
    if not found.drain_timeout_s >= 0:
        raise ValueError("--drain-timeout-s must not be negative")
