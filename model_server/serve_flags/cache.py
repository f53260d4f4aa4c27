"""Flags for the prefix cache and the batch: their sizes, and how blocks are found and evicted.
Caller: `settings`.
"""

from __future__ import annotations

import argparse

from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import EVICTION_NAMES
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS
from model_server.core.scheduler import SchedulerLimits
from model_server.serve_flags.argument import Group, accepted, choice, switch, value
from model_server.server.backends import DEFAULT_COST_BLOCKS, DEFAULT_HF_BLOCKS


def add_groups(run: argparse.ArgumentParser) -> None:
    _add_size(run.add_argument_group("cache and batch"))
    _add_policy(
        run.add_argument_group(
            "cache policy", "how the prefix cache finds and evicts blocks; the defaults are vLLM's"
        )
    )


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


def _add_size(group: Group) -> None:
    value(group, "--block-size", "N", "tokens in a block", default=16)
    blocks = (
        f"default {DEFAULT_COST_BLOCKS}; {DEFAULT_HF_BLOCKS} with --runner hf, whose blocks take real memory"
    )
    value(group, "--num-blocks", "N", f"blocks in the KV cache ({blocks})")
    switch(
        group,
        "--no-prefix-caching",
        "do not cache prefixes: compute every prompt from its first token",
    )
    value(
        group,
        "--max-model-len",
        "N",
        "largest number of tokens of a prompt and its answer together (default: as many as the cache holds and the model allows)",
    )
    value(group, "--max-num-seqs", "N", "largest number of requests in one batch", default=256)
    value(
        group,
        "--max-num-batched-tokens",
        "N",
        "largest number of tokens that one step computes; a longer prompt takes several steps",
        default=2048,
    )
    value(group, "--max-loras", "N", "largest number of different adapters in one batch", default=4)


def _add_policy(group: Group) -> None:
    choice(
        group,
        "--prefix-caching-hash-algo",
        HASH_ALGORITHMS,
        "hash function of the block hashes, as in vLLM",
    )
    value(
        group,
        "--hash-seed",
        "TEXT",
        "start of the chain of block hashes, as PYTHONHASHSEED in vLLM; give servers whose events are compared the same seed",
        default=DEFAULT_SEED,
    )
    choice(
        group,
        "--eviction",
        EVICTION_NAMES,
        "which unused block is evicted first. lru: the block that was freed first; last-touch: as lru, but of the blocks that were last "
        "used in the same step, the block with the longest prefix; lfu: the block that was used least often; "
        "lfu-ageing: as lfu, but old uses fade",
    )
    accepted(group, "--free-queue", "linked")
    switch(
        group,
        "--partial-blocks",
        "also reuse blocks that are not full, token by token: prompts shorter than a block then hit, and longer prompts hit a "
        "little more; not possible with KV events, since those name full blocks only",
    )
    value(
        group,
        "--max-unused-blocks",
        "N",
        "keep the content of at most N blocks that no request uses (default: keep the content of all such blocks)",
    )
    value(
        group,
        "--prompt-cache-size",
        "N",
        "keep N whole prompts with the logits after their last token: the same prompt is then answered without any prefill; "
        "the prompt's blocks, its last and partly filled block included, stay until other requests need them; 0 keeps no prompt",
        default=0,
    )
    value(
        group,
        "--preallocated-blocks",
        "N",
        "spare blocks that a request takes together with each new block, while blocks are free",
        default=0,
    )
