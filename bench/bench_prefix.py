"""Measures what the prefix hash and the prefix table cost in a large pool: microseconds for a call and bytes
for an entry.

Run with `python -m bench.bench_prefix`. Prints tables and asserts nothing, since clocks differ. Times are CPU
times of the thread, so other processes do not change them. The garbage collector runs with Python's
default settings, so its pauses are included.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.eviction import evict
from epp.picker.prefix_index.guesses import drop, guess, prove
from epp.picker.prefix_index.servers import add_endpoint, resize
from epp.picker.prefix_index.table import ChunkSchedule, PrefixTable
from epp.picker.server_caches import Roots, hash_chain

SCHEDULE = ChunkSchedule()
PROMPT_CHUNKS = 448
"""400 KB, about 100k tokens."""

Chain = list[ChunkHash]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: its chain, and the server that gets it."""

    name: EndpointName
    chain: Chain


class Pool:
    """A table and its servers. The table is always full, as in a long-running picker: each new entry evicts
    an old one.
    """

    def __init__(self, *, servers: int, entries: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = [EndpointName(f"server-{n}") for n in range(servers)]
        self.entries = entries
        self.now = 0.0
        self.table = PrefixTable(schedule=SCHEDULE, max_entries=entries, ttl_s=1e9)
        for name in self.names:
            add_endpoint(self.table, name, capacity_bytes=2**50)

    def chunks(self, n: int) -> Chain:
        return [ChunkHash(self.rng.getrandbits(64)) for _ in range(n)]

    def any_server(self) -> EndpointName:
        return self.rng.choice(self.names)

    def fill(self, turns: Iterator[Turn]) -> None:
        """Record twice as many entries as the table can hold, so that the table looks like a used one."""
        recorded = 0
        while recorded < 2 * self.entries:
            turn = next(turns)
            recorded += self.serve(turn)
        # From now on each server is bounded by its current size. All of these bounds together are a little
        # less than the total bound.
        for name in self.names:
            resize(self.table, name, capacity_bytes=self.table.mirrors[name].used_bytes)
        self.table.set_bounds(max_entries=2 * self.entries, ttl_s=1e9)

    def serve(self, turn: Turn) -> int:
        self.now += 0.01
        added = self.table.record(turn.name, turn.chain, now=self.now).added
        evict(self.table, self.now)
        return added


# -- workloads: endless requests -----------------------------------------------------------------------------


def cold_prompts(pool: Pool, *, chunks: int) -> Iterator[Turn]:
    """Yield prompts that are all new."""
    while True:
        yield Turn(name=pool.any_server(), chain=pool.chunks(chunks))


def conversations(pool: Pool, *, chunks: int) -> Iterator[Turn]:
    """Yield turns of conversations under one of ten system prompts. Conversations grow by a few chunks a turn
    and mostly keep to one server.
    """
    systems = [pool.chunks(16) for _ in range(10)]

    def begin() -> Turn:
        return Turn(name=pool.any_server(), chain=pool.rng.choice(systems) + pool.chunks(4))

    open_turns = [begin() for _ in range(pool.entries // chunks)]
    while True:
        n = pool.rng.randrange(len(open_turns))
        turn = open_turns[n]
        yield turn
        if len(turn.chain) > chunks:
            open_turns[n] = begin()
        else:
            name = turn.name if pool.rng.random() < 0.9 else pool.any_server()
            open_turns[n] = Turn(name=name, chain=turn.chain + pool.chunks(pool.rng.randrange(1, 12)))


Workload = Callable[[Pool], Iterator[Turn]]

WORKLOADS: dict[str, Workload] = {
    "cold prompts": lambda pool: cold_prompts(pool, chunks=PROMPT_CHUNKS),
    "conversations": lambda pool: conversations(pool, chunks=200),
    "cold, 2 KB each": lambda pool: cold_prompts(pool, chunks=8),
}


# -- measuring -----------------------------------------------------------------------------------------------


class Clock:
    """Samples of named steps, in microseconds."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def time(self, step: str, run: Callable[[], object]) -> float:
        start = time.thread_time_ns()
        run()
        taken_us = (time.thread_time_ns() - start) / 1000
        self.samples.setdefault(step, []).append(taken_us)
        return taken_us

    def add(self, step: str, taken_us: float) -> None:
        self.samples.setdefault(step, []).append(taken_us)

    def rows(self, title: str) -> None:
        for step, samples in self.samples.items():
            samples.sort()
            p50, p99 = samples[len(samples) // 2], samples[len(samples) * 99 // 100]
            print(f"{title:<20}{step:<18}{p50:>9.1f}{p99:>9.1f}{samples[-1]:>10.1f}")
            title = ""


def bench_hashing() -> None:
    print(f"\n{'hashing':<20}{'chunks':>8}{'us':>10}")
    seed = Roots(SCHEDULE).seed(model="model")
    for kb in (1, 40, 400):
        prompt = os.urandom(kb * 1000)
        times_us = []
        for _ in range(300):
            start = time.thread_time_ns()
            chain = hash_chain(prompt, seed=seed, schedule=SCHEDULE)
            times_us.append((time.thread_time_ns() - start) / 1000)
        print(f"{f'{kb} KB':<20}{len(chain):>8}{statistics.median(times_us):>10.1f}")


def bench_calls(title: str, workload: Workload, *, servers: int, entries: int, rounds: int) -> None:
    pool = Pool(servers=servers, entries=entries, seed=1)
    turns = workload(pool)
    pool.fill(turns)
    table, clock = pool.table, Clock()
    for n in range(rounds):
        turn = next(turns)
        pool.now += 0.01
        pick_us = clock.time("match", lambda turn=turn: table.match(turn.chain))  # type: ignore[misc]  # bound now
        start = time.thread_time_ns()
        guessed = guess(table, turn.name, turn.chain)
        guess_us = (time.thread_time_ns() - start) / 1000
        clock.add("guess", guess_us)
        clock.add("match + guess", pick_us + guess_us)
        if n % 10 == 0:
            clock.time("drop", lambda guessed=guessed: drop(table, guessed))  # type: ignore[misc]  # bound now
        else:
            start = time.thread_time_ns()
            prove(table, turn.name, turn.chain, guessed, now=pool.now)
            clock.add("prove", (time.thread_time_ns() - start) / 1000)
            clock.time("touch", lambda turn=turn: table.touch(turn.name, turn.chain, now=pool.now))  # type: ignore[misc]  # bound now
        clock.time("evict", lambda: evict(table, pool.now))
    clock.rows(title)
    runs = len(table.index)
    print(f"{'':<20}{table.entries:,} entries in {runs:,} runs")


def bench_memory(*, servers: int, entries: int) -> None:
    print(f"\n{'bytes an entry':<20}{'1 copy':>9}{'2 copies':>10}")
    for chunks in (PROMPT_CHUNKS, 40, 8, 4, 2, 1):
        # Small prompts cost the same in a smaller table, and tracing is slow.
        total = entries if chunks >= 40 else entries // 8
        sizes = [_bytes_per_entry(chunks=chunks, copies=n, servers=servers, entries=total) for n in (1, 2)]
        print(f"{f'{chunks}-chunk prompts':<20}{sizes[0]:>9.0f}{sizes[1]:>10.0f}")


def _bytes_per_entry(*, chunks: int, copies: int, servers: int, entries: int) -> float:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool = Pool(servers=servers, entries=entries, seed=1)
    for n in range(entries // chunks // copies):
        chain = pool.chunks(chunks)
        for copy in range(copies):
            name = pool.names[(n + copy) % servers]
            pool.table.record(name, chain, now=float(n))
    chain = []
    gc.collect()
    taken_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken_bytes / pool.table.entries


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_prefix", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--servers", type=int, default=100, help="number of servers (default %(default)s)")
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="number of (server, chunk) pairs in the table"
    )
    parser.add_argument("--rounds", type=int, default=2000, help="number of timed requests in each workload")
    args = parser.parse_args()
    bench_hashing()
    bench_memory(servers=args.servers, entries=args.entries)
    print(f"\n{f'{args.servers} servers':<20}{'us':<18}{'p50':>9}{'p99':>9}{'max':>10}")
    for title, workload in WORKLOADS.items():
        bench_calls(title, workload, servers=args.servers, entries=args.entries, rounds=args.rounds)


if __name__ == "__main__":
    main()
