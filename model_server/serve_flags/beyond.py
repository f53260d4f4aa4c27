"""Flags for the parts around the cache: the store of prefixes below it, the transfer of blocks to other
servers, and KV events. Caller: `settings`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model_server.serve_flags.argument import Group, accepted, choice, switch, value
from model_server.server.kv_events import DEFAULT_BUFFER_BATCHES
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.remote_prefill import KvTransferSettings
from model_server.tiers.placement import SCORES
from model_server.tiers.settings import FEW_CHUNKS, PROBE_HEADS, KvStoreSettings
from model_server.tiers.similarity import DEFAULT_ALPHA


def add_groups(run: argparse.ArgumentParser) -> None:
    store = run.add_argument_group(
        "KV store (experimental)",
        "with --runner hf: keeps prefixes that the KV cache has no room for, in main memory and on disk",
    )
    _add_kv_store(store)
    _add_kv_transfer(
        run.add_argument_group(
            "prefill and decode apart", "with --runner cost: other servers compute the prompts"
        )
    )
    _add_kv_events(
        run.add_argument_group(
            "KV events", "messages over ZeroMQ, in vLLM's format, about the blocks that the cache holds"
        )
    )


def kv_store(args: argparse.Namespace) -> KvStoreSettings | None:
    if args.kv_store is None:
        return None
    return KvStoreSettings(
        folder=args.kv_store,
        size_bytes=int(args.kv_store_size * 1e9),
        cpu_bytes=int(args.kv_store_cpu_size * 1e9),
        device_bytes=int(args.kv_store_device_size * 1e9),
        ratio=args.kv_store_ratio,
        score=args.kv_store_score,
        probe_heads=args.kv_store_probe_heads,
        alpha=args.kv_store_alpha,
        chunk_tokens=args.kv_store_chunk_tokens,
        chunk_share=args.kv_store_chunk_share,
    )


def kv_events(args: argparse.Namespace) -> KvEventSettings | None:
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


def kv_transfer(args: argparse.Namespace) -> KvTransferSettings | None:
    if not args.kv_transfer:
        return None
    return KvTransferSettings(
        bytes_per_token=args.kv_transfer_bytes_per_token, bytes_per_second=args.kv_transfer_rate
    )


def _add_kv_transfer(group: Group) -> None:
    switch(
        group,
        "--kv-transfer",
        "obey the header x-prefiller-host-port: let the server at that address compute the prompt, and fetch the prompt's "
        "blocks from it; also hand out blocks to other servers. Use this only behind a gateway that removes the header "
        "from clients' requests",
    )
    size = "size of one token's KV cache, in bytes"
    value(group, "--kv-transfer-bytes-per-token", "BYTES", size, default=131_072.0)
    value(group, "--kv-transfer-rate", "BYTES", "speed of a transfer, in bytes a second", default=1e10)


def _add_kv_store(group: Group) -> None:
    value(
        group,
        "--kv-store",
        "DIR",
        "folder of the store: the server stores the KV cache of every computed prefix in this folder, and loads a prefix from "
        "it when the cache has evicted the prefix (default: no store)",
        kind=Path,
    )
    value(group, "--kv-store-size", "GB", "largest size of the store on disk", default=20.0)
    value(
        group,
        "--kv-store-cpu-size",
        "GB",
        "main memory for parts of the store that are used often",
        default=1.0,
    )
    value(
        group,
        "--kv-store-device-size",
        "GB",
        "memory of the model's device for such parts, in addition to --num-blocks; only with --kv-store-ratio under 1",
        default=0.0,
    )
    accepted(group, "--kv-store-mode", ("load",))
    accepted(group, "--kv-store-reorder-share", None)
    value(
        group,
        "--kv-store-ratio",
        "R",
        "share of a stored prefix's tokens that is read. 1: the whole prefix is loaded, and answers are exact; 0.5: only the "
        "half of the tokens that matters most to the request is read, and answers are approximate",
        default=1.0,
    )
    choice(
        group,
        "--kv-store-score",
        tuple(SCORES),
        "with --kv-store-ratio under 1: score of the chunks on disk that the fast tiers keep. uses: how often a chunk was read; "
        "importance: its important tokens; product: important tokens x uses",
    )
    heads = "with --kv-store-ratio under 1: query heads that choose the tokens of a layer"
    value(group, "--kv-store-probe-heads", "N", heads, default=PROBE_HEADS)
    value(
        group,
        "--kv-store-alpha",
        "A",
        "with --kv-store-ratio under 1: the heads of a layer must agree more than j ** A, where j is the agreement of random "
        "choices; otherwise the layer reads the whole prefix",
        default=DEFAULT_ALPHA,
    )
    value(group, "--kv-store-chunk-tokens", "N", "tokens in a chunk on disk", default=16)
    value(
        group,
        "--kv-store-chunk-share",
        "S",
        "with --kv-store-ratio under 1: read only the chunks on disk that hold this share of the chosen tokens' weight, and "
        "replace the chosen tokens of other chunks by tokens from these chunks; 1 reads every chunk that holds a chosen token",
        default=FEW_CHUNKS,
    )


def _add_kv_events(group: Group) -> None:
    value(
        group,
        "--kv-events-endpoint",
        "ADDRESS",
        "address to publish KV events at, for example tcp://*:5557 (default: publish none)",
        kind=str,
    )
    missed = "address at which subscribers ask for events that they missed"
    value(group, "--kv-events-replay-endpoint", "ADDRESS", missed, kind=str)
    group.add_argument(
        "--kv-events-topic", default="", metavar="TEXT", help="topic: the first frame of each message"
    )
    value(
        group,
        "--kv-events-buffer",
        "N",
        "messages that are kept for replay; a message about 2,048 new tokens takes about 20 KB",
        default=DEFAULT_BUFFER_BATCHES,
    )
