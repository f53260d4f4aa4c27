"""Measures the part of row 001-8 that needs no model: the CPU time of the engine's core for a step, with the
block cache on and off.

Run with `python -m bench.model_server.bench_step_cpu [--json FILE]`, which takes under a minute. All prompts
differ, so no hit saves anything. There are 64 requests at a time, with 512 tokens and 64 answered tokens. The
runner computes nothing and answers at once. The same requests are served with and without the cache in turns;
the table has medians. The share is that of a step of 20 ms, the decode step of the cost model's default (an
8B model on one data-centre GPU). This step is modelled, not measured here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from bench.tables import show, write_json
from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig, StepResult
from model_server.core.hashing import HASH_ALGORITHMS, HashAlgorithm
from model_server.core.request import Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits, StepPlan

STEP_MS = 20.0
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 128, 512, 64


class Instant:
    """Answers with token 1 at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TokenId(1) if chunk.samples else None for chunk in plan.chunks], 0.0)


def serve(algorithm: HashAlgorithm | None) -> tuple[float, int]:
    """Return CPU milliseconds and steps for all requests. Options of None turn the cache off."""
    config = EngineConfig(
        num_blocks=4096,
        block_size_tokens=16,
        enable_prefix_caching=algorithm is not None,
        eos_token_id=TokenId(-1),
        cache=CacheOptions(hash_algorithm=algorithm or "sha256"),
        limits=SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    engine = Engine(config, Instant())
    for number in range(REQUESTS):
        engine.add(
            Request(
                request_id=RequestId(str(number)),
                token_ids=[TokenId(number * PROMPT_TOKENS + i) for i in range(PROMPT_TOKENS)],
                max_tokens=ANSWER_TOKENS,
                arrival_s=0.0,
            )
        )
    steps, start = 0, time.thread_time_ns()
    while engine.num_unfinished:
        engine.step(now=0.0)
        steps += 1
    return (time.thread_time_ns() - start) / 1e6, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.bench_step_cpu",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    settings: tuple[HashAlgorithm | None, ...] = (None, *HASH_ALGORITHMS)
    taken: dict[HashAlgorithm | None, list[float]] = {setting: [] for setting in settings}
    steps = 0
    for _ in range(args.rounds):
        for setting in settings:
            cpu_ms, steps = serve(setting)
            taken[setting].append(cpu_ms)
    without = statistics.median(taken[None])
    rows: list[list[str | float]] = []
    for setting in settings:
        cpu_ms = statistics.median(taken[setting])
        of_cache = (cpu_ms - without) / steps
        rows.append([setting or "no cache", cpu_ms / steps, of_cache, f"{of_cache / STEP_MS:.2%}"])
    columns = ("hash", "core, ms a step", "of which the cache", f"share of {STEP_MS:.0f} ms")
    show(f"001-8: CPU of the core, {REQUESTS} unique prompts, {steps} steps", columns, rows)
    write_json(args.json, {"001-8": [dict(zip(columns, row, strict=True)) for row in rows]})


if __name__ == "__main__":
    main()
