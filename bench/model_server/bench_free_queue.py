"""Measures row 001-4: the cost of taking blocks out of the middle of the free queue, by hit rate and size
of the pool.

Run with `python -m bench.model_server.bench_free_queue`, which takes a minute or two. The linked list is the
product's. The lazy queue is here only for comparison. A request has 64 blocks. The hit rate is the
probability that all of them are found in the free queue; otherwise all are new. There are 8 requests at a
time. `request` is CPU time, `longest` wall time. Both queues take turns in each round, and the table has
medians of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.tables import show
from model_server.core.block_pool import BlockPool
from model_server.core.blocks import Block
from model_server.core.free_queue import FreeOrder, LinkedQueue
from model_server.core.hashing import BlockHash

SEQUENCE_BLOCKS = 64
LIVE = 8
HIT_RATES = (0.0, 0.5, 0.9)
POOL_BLOCKS = (1024, 8192, 65_536)


@dataclass(frozen=True, slots=True)
class Measured:
    request_us: float
    longest_us: float


class LazyQueue:
    """A hit only marks the block, and marked blocks are skipped when they come to the front. A marked block
    that is freed again has to leave its old place first, which is O(n).

    Invariant: every marked block has exactly one entry, which is stale. Every free block has exactly one
    entry that is not stale.
    """

    __slots__ = ("_entries", "_marked")

    def __init__(self) -> None:
        self._entries: deque[Block] = deque()
        self._marked: set[Block] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._marked)

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._entries if block not in self._marked)

    def append(self, block: Block) -> None:
        if block in self._marked:
            self._entries.remove(block)
            self._marked.remove(block)
        self._entries.append(block)

    def remove(self, block: Block) -> None:
        assert block not in self._marked, "the block is not in the queue"
        self._marked.add(block)

    def pop_first(self) -> Block:
        assert len(self), "no free block is left"
        while (block := self._entries.popleft()) in self._marked:
            self._marked.remove(block)
        return block

    def check_integrity(self) -> None:
        assert len(self._entries) == len(set(self._entries))
        assert self._marked <= set(self._entries)


QUEUES: dict[str, type[LinkedQueue | LazyQueue]] = {"linked": LinkedQueue, "lazy": LazyQueue}


class BusyPool:
    """A pool in the state of a busy server: every free block has content, and half of the content will be
    requested again.
    """

    def __init__(self, queue: FreeOrder, *, num_blocks: int, hit_rate: float) -> None:
        self._pool = BlockPool(num_blocks, order=queue)
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
        thread = time.thread_time_ns()
        for names in prompts:
            start = time.perf_counter_ns()
            self._admit(names)
            walls.append(time.perf_counter_ns() - start)
        return Measured((time.thread_time_ns() - thread) / len(prompts) / 1e3, max(walls) / 1e3)

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


def measure(*, num_blocks: int, hit_rate: float, rounds: int, requests: int) -> dict[str, Measured]:
    servers = {
        name: BusyPool(queue(), num_blocks=num_blocks, hit_rate=hit_rate) for name, queue in QUEUES.items()
    }
    taken: dict[str, list[Measured]] = {name: [] for name in QUEUES}
    for _ in range(rounds):
        for name, server in servers.items():
            taken[name].append(server.serve(server.prompts(requests)))
    return {
        name: Measured(
            statistics.median(one.request_us for one in ones),
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
    args = parser.parse_args()
    rows: list[list[str | float | int]] = []
    for num_blocks in POOL_BLOCKS:
        for hit_rate in HIT_RATES:
            results = measure(
                num_blocks=num_blocks, hit_rate=hit_rate, rounds=args.rounds, requests=args.requests
            )
            for name, one in results.items():
                rows.append([num_blocks, hit_rate, name, one.request_us, one.longest_us])
    columns = ("blocks", "hit rate", "queue", "request us", "longest us")
    show("001-4: microseconds for a request of 64 blocks", columns, rows)


if __name__ == "__main__":
    main()
