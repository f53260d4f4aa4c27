"""The prefix cache and the batch: how large, how blocks are found and forgotten. Caller: `settings`."""

from __future__ import annotations

import argparse

from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import EVICTION_NAMES, QUEUES
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS
from model_server.core.scheduler import SchedulerLimits
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS


def add_groups(run: argparse.ArgumentParser) -> None:
    size = run.add_argument_group("cache and batch")
    _add_blocks(size)
    _add_batch(size)
    policy = run.add_argument_group(
        "cache policy", "how the prefix cache finds and forgets; the defaults are vLLM's"
    )
    _add_hashing(policy)
    _add_eviction(policy)
    _add_more_reuse(policy)


def options(args: argparse.Namespace) -> CacheOptions:
    return CacheOptions(
        hash_algorithm=args.prefix_caching_hash_algo,
        hash_seed=args.hash_seed,
        eviction=args.eviction,
        free_queue=args.free_queue,
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
        help=f"blocks in the KV cache (default {DEFAULT_COST_BLOCKS}; {DEFAULT_HF_BLOCKS} with --runner hf, where they take memory)",
    )
    group.add_argument(
        "--kv-cache-max-concurrency",
        type=int,
        metavar="N",
        help="instead of --num-blocks: as many blocks as N requests of --max-model-len tokens fill",
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its start")


def _add_batch(group: argparse._ArgumentGroup) -> None:
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


def _add_hashing(group: argparse._ArgumentGroup) -> None:
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


def _add_eviction(group: argparse._ArgumentGroup) -> None:
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


def _add_more_reuse(group: argparse._ArgumentGroup) -> None:
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
