"""Measures the cost of finding a partial block, by the number of cached blocks that could match.

Run with `python -m bench.model_server.bench_partial [--json FILE]`, which takes some seconds. Prompts have 15
tokens and blocks 16, as in the hash table report, and all prompts are cached. Either all prompts begin with
the same token, as with a BOS token or a chat template, or no two of them do. The figures are CPU microseconds
of one look-up, and of one decoded token (its block is listed again). They are medians of rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from bench.model_server.tables import show, write_json
from model_server.core.cache_options import CacheOptions
from model_server.core.kv_cache import KVCacheManager
from model_server.core.partial_cache import make_manager
from model_server.core.request import Request, RequestId, TokenId

SIZES = (500, 1000, 2000, 20_000)
BLOCK_TOKENS, PROMPT_TOKENS = 16, 15
PROBES = 100


def prompt_of(rng: random.Random, first: int) -> Request:
    tokens = [first, *(rng.randrange(50_000) for _ in range(PROMPT_TOKENS - 1))]
    return Request(
        request_id=RequestId(str(rng.random())),
        token_ids=[TokenId(token) for token in tokens],
        max_tokens=1000,
        arrival_s=0.0,
    )


def admit_computed(manager: KVCacheManager, request: Request) -> None:
    prefix = manager.get_computed(request)
    if not manager.allocate(request, prefix, num_new_tokens=PROMPT_TOKENS - prefix.num_tokens):
        raise ValueError("the cache is too small")
    request.num_computed_tokens = PROMPT_TOKENS
    manager.computed(request)


def measure(num_requests: int, *, common: bool, rounds: int) -> tuple[float, float]:
    """Return the microseconds of a look-up and of a decoded token."""
    rng = random.Random(1)
    options = CacheOptions(partial_blocks=True, hash_algorithm="xxh3")
    manager = make_manager(
        num_blocks=num_requests + 2 * PROBES,
        block_size_tokens=BLOCK_TOKENS,
        enable_prefix_caching=True,
        options=options,
    )
    for number in range(num_requests):
        request = prompt_of(rng, 1 if common else number)
        admit_computed(manager, request)
        manager.free(request)
        manager.end_step()
    lookups, decodes = [], []
    for _ in range(rounds):
        probes = [prompt_of(rng, 1 if common else number) for number in range(PROBES)]
        start = time.thread_time_ns()
        for probe in probes:
            manager.get_computed(probe)
        lookups.append((time.thread_time_ns() - start) / 1e3 / PROBES)
        for probe in probes:
            admit_computed(manager, probe)
            probe.token_ids.append(TokenId(5))
            manager.append(probe, num_new_tokens=1)
            probe.num_computed_tokens += 1
        start = time.thread_time_ns()
        for probe in probes:
            manager.computed(probe)
        decodes.append((time.thread_time_ns() - start) / 1e3 / PROBES)
        for probe in probes:
            manager.free(probe)
        manager.take_copies()
        manager.end_step()
    manager.check_integrity()
    return statistics.median(lookups), statistics.median(decodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.bench_partial",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of cached prompts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows: list[list[float | int]] = []
    for size in args.sizes:
        apart, common = (measure(size, common=common, rounds=args.rounds) for common in (False, True))
        rows.append([size, apart[0], common[0], apart[1], common[1]])
    columns = (
        "cached prompts",
        "look-up us, first tokens differ",
        "look-up us, first token in common",
        "decoded token us, first tokens differ",
        "decoded token us, first token in common",
    )
    show("000-2: partial blocks, CPU by the number of candidates", columns, rows)
    write_json(args.json, {"000-2": [dict(zip(columns, row, strict=True)) for row in rows]})


if __name__ == "__main__":
    main()
