"""Measures row 001-4: the cost of taking blocks out of the middle of the free queue, in its three forms, by
hit rate and pool size.

Run with `python -m bench.model_server.bench_free_queue [--json FILE]`, which takes a minute or two. A request
has 64 blocks. The hit rate is the probability that all of them are found in the free queue; otherwise all are
new. There are 8 requests at a time, and each request ends a step. `request` is the CPU time of the engine's
thread for one request (hold or take, cache, release, and the wait for the sweeping thread). `process` is the
CPU time of all threads. `longest` is wall time. The three forms take turns in each round, and the table has
medians of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.model_server.tables import show, write_json
from model_server.core.block_pool import BlockPool
from model_server.core.blocks import Block
from model_server.core.eviction import QUEUES, QueueName, make_order
from model_server.core.hashing import BlockHash

SEQUENCE_BLOCKS = 64
LIVE = 8
HIT_RATES = (0.0, 0.5, 0.9)
POOL_BLOCKS = (1024, 8192, 65_536)


@dataclass(frozen=True, slots=True)
class Measured:
    request_us: float
    process_us: float
    longest_us: float


class BusyPool:
    """A pool in the state of a busy server: every free block has content, and half of the content will be
    requested again.
    """

    def __init__(self, queue: QueueName, *, num_blocks: int, hit_rate: float) -> None:
        self._pool = BlockPool(num_blocks, order=make_order("lru", queue=queue))
        self._rng = random.Random(num_blocks)
        self._hit_rate = hit_rate
        self._known: deque[list[BlockHash]] = deque(maxlen=max(2, num_blocks // SEQUENCE_BLOCKS // 2))
        self._live: deque[list[Block]] = deque()
        self._made = 0
        while self._pool.num_unused < num_blocks - (LIVE + 1) * SEQUENCE_BLOCKS:
            self._admit(self._new_names())

    def prompts(self, count: int) -> list[list[BlockHash]]:
        """Return the names for the next requests. Making them is not part of the measured time."""
        return [
            self._rng.choice(self._known) if self._rng.random() < self._hit_rate else self._new_names()
            for _ in range(count)
        ]

    def serve(self, prompts: Sequence[list[BlockHash]]) -> Measured:
        walls = []
        thread, process = time.thread_time_ns(), time.process_time_ns()
        for names in prompts:
            start = time.perf_counter_ns()
            self._admit(names)
            walls.append(time.perf_counter_ns() - start)
        self._pool.num_free  # noqa: B018  # waits for the sweep that these requests started
        thread, process = time.thread_time_ns() - thread, time.process_time_ns() - process
        return Measured(thread / len(prompts) / 1e3, process / len(prompts) / 1e3, max(walls) / 1e3)

    def _new_names(self) -> list[BlockHash]:
        self._made += 1
        names = [BlockHash(b"%d.%d" % (self._made, depth)) for depth in range(SEQUENCE_BLOCKS)]
        self._known.append(names)
        return names

    def _admit(self, names: list[BlockHash]) -> None:
        pool = self._pool
        hits: list[Block] = []
        for name in names:
            block = pool.find(name)
            if block is None:
                break
            hits.append(block)
        pool.hold(hits)
        table = hits + pool.take(len(names) - len(hits))
        for index in range(len(hits), len(names)):
            pool.cache(table[index], names[index], prefix_blocks=index + 1)
        self._live.append(table)
        if len(self._live) > LIVE:
            pool.release(self._live.popleft())
        pool.end_step()


def measure(*, num_blocks: int, hit_rate: float, rounds: int, requests: int) -> dict[QueueName, Measured]:
    servers = {name: BusyPool(name, num_blocks=num_blocks, hit_rate=hit_rate) for name in QUEUES}
    taken: dict[QueueName, list[Measured]] = {name: [] for name in QUEUES}
    for _ in range(rounds):
        for name, server in servers.items():
            taken[name].append(server.serve(server.prompts(requests)))
    return {
        name: Measured(
            statistics.median(one.request_us for one in ones),
            statistics.median(one.process_us for one in ones),
            statistics.median(one.longest_us for one in ones),
        )
        for name, ones in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.bench_free_queue",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default %(default)s)")
    parser.add_argument("--requests", type=int, default=100, help="number of requests in each round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows: list[list[str | float | int]] = []
    for num_blocks in POOL_BLOCKS:
        for hit_rate in HIT_RATES:
            results = measure(
                num_blocks=num_blocks, hit_rate=hit_rate, rounds=args.rounds, requests=args.requests
            )
            for name, one in results.items():
                rows.append([num_blocks, hit_rate, name, one.request_us, one.process_us, one.longest_us])
    columns = ("blocks", "hit rate", "queue", "request us", "process us", "longest us")
    show("001-4: microseconds for a request of 64 blocks", columns, rows)
    write_json(args.json, {"001-4": [dict(zip(columns, row, strict=True)) for row in rows]})


if __name__ == "__main__":
    main()
