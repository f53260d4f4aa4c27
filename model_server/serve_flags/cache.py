"""Flags for the prefix cache and the batch: their sizes, and how blocks are found and evicted.
Caller: `settings`.
"""

from __future__ import annotations

import argparse

from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import EVICTION_NAMES
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS
from model_server.core.scheduler import SchedulerLimits
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS


def add_groups(run: argparse.ArgumentParser) -> None:
    size = run.add_argument_group("cache and batch")
    _add_blocks(size)
    _add_batch(size)
    policy = run.add_argument_group(
        "cache policy", "how the prefix cache finds and evicts blocks; the defaults are vLLM's"
    )
    _add_hashing(policy)
    _add_eviction(policy)
    _add_more_reuse(policy)


def options(args: argparse.Namespace) -> CacheOptions:
    return CacheOptions(
        hash_algorithm=args.prefix_caching_hash_algo,
        hash_seed=args.hash_seed,
        eviction=args.eviction,
        max_unused_blocks=args.max_unused_blocks,
        preallocated_blocks=args.preallocated_blocks,
        partial_blocks=args.partial_blocks,
    )


def limits(args: argparse.Namespace) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_loras=args.max_loras,
    )


def _add_blocks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens in a block (default %(default)s)"
    )
    group.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help=f"blocks in the KV cache (default {DEFAULT_COST_BLOCKS}; {DEFAULT_HF_BLOCKS} with --runner hf, whose blocks take real memory)",
    )
    group.add_argument(
        "--kv-cache-max-concurrency",
        type=int,
        metavar="N",
        help="used instead of --num-blocks: the cache gets as many blocks as N requests of --max-model-len tokens fill",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="do not cache prefixes: compute every prompt from its first token",
    )


def _add_batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="largest number of tokens of a prompt and its answer together (default: as many as the cache holds and the model allows)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="largest number of requests in one batch (default %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="largest number of tokens that one step computes; a longer prompt takes several steps (default %(default)s)",
    )
    group.add_argument(
        "--max-loras",
        type=int,
        default=4,
        metavar="N",
        help="largest number of different adapters in one batch (default %(default)s)",
    )


def _add_hashing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGORITHMS,
        default="sha256",
        help="hash function of the block hashes: sha256 and sha256_cbor give vLLM's hashes; xxh3 is faster, but its hashes can be "
        "forged; direct is slow, because it hashes the whole prefix for each block (default %(default)s)",
    )
    group.add_argument(
        "--hash-seed",
        default=DEFAULT_SEED,
        metavar="TEXT",
        help="start of the chain of block hashes, as PYTHONHASHSEED in vLLM; give servers whose events are compared the same seed "
        "(default %(default)s)",
    )


def _add_eviction(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eviction",
        choices=EVICTION_NAMES,
        default="lru",
        help="which unused block is evicted first. lru: the block that was freed first; last-touch: as lru, but of the blocks that were last "
        "used in the same step, the block with the longest prefix; lfu: the block that was used least often (default %(default)s)",
    )
    group.add_argument(
        "--free-queue",
        choices=("linked",),
        help=argparse.SUPPRESS,  # accepted for a release: there is only the linked list now
    )


def _add_more_reuse(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--partial-blocks",
        action="store_true",
        help="also reuse blocks that are not full, token by token: prompts shorter than a block then hit, and longer prompts hit a "
        "little more; not possible with KV events, since those name full blocks only",
    )
    group.add_argument(
        "--max-unused-blocks",
        type=int,
        metavar="N",
        help="keep the content of at most N blocks that no request uses (default: keep the content of all such blocks)",
    )
    group.add_argument(
        "--prompt-cache-size",
        type=int,
        default=0,
        metavar="N",
        help="keep N whole prompts with the logits after their last token: the same prompt is then answered without any prefill; "
        "the prompt's blocks, its last and partly filled block included, stay until other requests need them "
        "(default %(default)s: keep no prompt)",
    )
    group.add_argument(
        "--preallocated-blocks",
        type=int,
        default=0,
        metavar="N",
        help="spare blocks that a request takes together with each new block, while blocks are free (default %(default)s)",
    )
