"""What goes beyond the cache: prefixes to a store below it, and word of its content to subscribers.
Caller: `settings`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model_server.server.kv_events import DEFAULT_BUFFER_BATCHES
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.remote_prefill import KvTransferSettings
from model_server.tiers.settings import FEW_CHUNKS, KvStoreSettings


def add_groups(run: argparse.ArgumentParser) -> None:
    store = run.add_argument_group(
        "KV store", "with --runner hf: prefixes beyond the KV cache, in main memory and on disk"
    )
    _add_kv_store(store)
    _add_mode(store)
    _add_approximation(store)
    _add_kv_transfer(
        run.add_argument_group(
            "prefill and decode apart", "with --runner cost: prompts computed by other servers"
        )
    )
    _add_kv_events(run.add_argument_group("KV events", "what the cache holds, over ZeroMQ, as vLLM sends it"))


def kv_store(args: argparse.Namespace) -> KvStoreSettings | None:
    if args.kv_store is None:
        return None
    return KvStoreSettings(
        folder=args.kv_store,
        size_bytes=int(args.kv_store_size * 1e9),
        cpu_bytes=int(args.kv_store_cpu_size * 1e9),
        device_bytes=int(args.kv_store_device_size * 1e9),
        ratio=args.kv_store_ratio,
        mode=args.kv_store_mode,
        chunk_share=args.kv_store_chunk_share,
        reorder_share=args.kv_store_reorder_share,
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


def _add_kv_transfer(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-transfer",
        action="store_true",
        help="obey x-prefiller-host-port: have a prompt computed there and take its blocks over; hand blocks over to others. "
        "Only behind a gateway that removes this header from clients' requests",
    )
    group.add_argument(
        "--kv-transfer-bytes-per-token",
        type=float,
        default=131_072.0,
        metavar="BYTES",
        help="KV of one token (default %(default)s)",
    )
    group.add_argument(
        "--kv-transfer-rate",
        type=float,
        default=1e10,
        metavar="BYTES",
        help="bytes a second that a transfer takes (default %(default)s)",
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
        help="main memory for often used parts of the store (default %(default)s)",
    )
    group.add_argument(
        "--kv-store-device-size",
        type=float,
        default=0.0,
        metavar="GB",
        help="memory of the model's device for them, beside --num-blocks; with a ratio under 1 (default %(default)s)",
    )


def _add_mode(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-store-mode",
        choices=("load", "auto"),
        default="load",
        help="load: whatever is stored is loaded; auto: a prefix is computed again where that is expected to take less time than its "
        "load, by this server's own speeds as it learns them; with a ratio of 1 (default %(default)s)",
    )


def _add_approximation(group: argparse._ArgumentGroup) -> None:
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
