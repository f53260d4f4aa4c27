"""Measures what sharing costs: bytes and CPU for each request, and how long a joining picker waits for the
table.

`python -m bench.bench_sharing`. First, four pickers in one process share over a channel without delay. The
CPU is that of this process: for collecting and sending at the picker that routed, and for receiving at one
other picker. Then two pickers share over a real Redis, whose own counters show bytes and CPU, and a third
picker joins. The prompts are turns of conversations over 8 shared system prompts, as in a chat.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from epp.config.sharing import Redis, Sharing
from tests.harness.processes import wait_until
from tests.harness.redis_server import RedisServer, running_redis
from tests.harness.sharing import Sharer, met, sharing_over
from tests.unit.sources.sharing.pickers import Replica, endpoints, meet

REQUESTS = 2000
SIZES = (1_000, 40_000, 400_000)
REPLICAS = 4
POOL = "abcdefgh"
PER_BATCH = 4
"""Requests that one picker routes in a flush interval, at 80 requests a second."""
FLUSH_S = Sharing().flush_interval_seconds


def prompts(size: int, *, count: int, seed: int) -> list[bytes]:
    """Return turns of conversations. Each conversation has one of 8 system prompts, which takes a quarter of
    `size`. A tenth of `size` is new in each turn.
    """
    rng = random.Random(seed)
    systems = [rng.randbytes(size // 8).hex().encode() for _ in range(8)]
    talks: list[bytes] = []
    made = []
    for _ in range(count):
        if not talks or rng.random() < 0.2:
            talks.append(rng.choice(systems) + rng.randbytes(size // 4).hex().encode())
        n = rng.randrange(max(0, len(talks) - 40), len(talks))
        talks[n] += rng.randbytes(size // 20).hex().encode()
        made.append(talks[n][: 2 * size])
    return made


def in_memory(size: int) -> None:
    """Print what sharing costs without Redis: each replica receives the batches of all others at once."""
    count = REQUESTS if size < 100_000 else REQUESTS // 8
    replicas = [Replica(n + 1, on=endpoints(POOL)) for n in range(REPLICAS)]
    meet(replicas, now=0.0)
    sending_s = hearing_s = 0.0
    sent_bytes = 0
    now = 10.0
    batch: list[tuple[Replica, bytes]] = []
    rng = random.Random(5)
    for prompt in prompts(size, count=count, seed=size):
        batch.append((rng.choice(replicas), prompt))
        if len(batch) < PER_BATCH * REPLICAS:
            continue
        now += 0.05
        for replica, text in batch:
            pick = replica.pick(text, now=now)
            replica.end(pick, now=now)
            replica.picker.housekeep(now=now)
        batch.clear()
        for replica in replicas:
            start = time.process_time()
            batches = replica.send(now=now)
            sending_s += time.process_time() - start
            sent_bytes += sum(map(len, batches))
            for other in replicas:
                if other is not replica:
                    start = time.process_time()
                    for data in batches:
                        other.exchange.receive(data, now=now)
                    hearing_s += time.process_time() - start
                    other.picker.housekeep(now=now)
    print(
        f"| {size // 1000} KB | {sent_bytes / count:.0f} | {sending_s / count * 1e6:.0f} | "
        f"{hearing_s / count / (REPLICAS - 1) * 1e6:.0f} |"
    )


async def over_redis(size: int, server: RedisServer) -> None:
    redis = Redis(url=server.url)
    async with (
        sharing_over(redis, pool=f"bench-{size}", flush_interval_seconds=FLUSH_S) as a,
        sharing_over(redis, pool=f"bench-{size}", flush_interval_seconds=FLUSH_S) as b,
    ):
        await met(a, b)
        before, cpu = await _redis_figures(server), time.process_time()
        sharers: list[Sharer] = [a, b]
        picks_s = 0.0
        count = 400
        for n, prompt in enumerate(prompts(size, count=count, seed=size)):
            start = time.process_time()
            sharers[n % 2].serve(prompt)
            picks_s += time.process_time() - start
            if n % PER_BATCH == 0:
                await asyncio.sleep(0.05)
        await wait_until(
            lambda: a.replica.exchange.waiting + b.replica.exchange.waiting == 0,
            what="every event is sent",
        )
        cpu = time.process_time() - cpu - picks_s
        after = await _redis_figures(server)
        into, out, redis_cpu = (x - y for x, y in zip(after, before, strict=True))
        joined_at = time.monotonic()
        async with sharing_over(redis, pool=f"bench-{size}", flush_interval_seconds=FLUSH_S) as joined:
            wanted = 0.9 * a.replica.picker.caches.table.entries
            await wait_until(
                lambda: joined.replica.picker.caches.table.entries >= wanted, what="the table", timeout_s=60
            )
            joined_s = time.monotonic() - joined_at
        print(
            f"| {size // 1000} KB | {into / count:.0f} | {out / count:.0f} | {redis_cpu / count * 1e6:.0f} | "
            f"{cpu / count * 1e6:.0f} | {a.replica.picker.caches.table.entries} | {joined_s:.2f} |"
        )


async def _redis_figures(server: RedisServer) -> tuple[float, float, float]:
    stats, cpu = await server.do("INFO", "stats"), await server.do("INFO", "cpu")
    return (
        stats["total_net_input_bytes"],
        stats["total_net_output_bytes"],
        cpu["used_cpu_user"] + cpu["used_cpu_sys"],
    )


async def _over_redis() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with running_redis(Path(directory)) as server:
            for size in SIZES[:2]:
                await over_redis(size, server)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{REPLICAS} pickers, batches of {PER_BATCH} requests\n")
    print(
        "| prompt | bytes sent for each request | CPU to send, us | CPU to receive at each other picker, us |"
    )
    print("| --- | --- | --- | --- |")
    for size in SIZES:
        in_memory(size)
    print("\nOver Redis: 2 pickers in one process, 80 requests a second\n")
    print(
        "| prompt | bytes into Redis | bytes out of Redis | Redis CPU, us | both pickers' CPU, us | entries | seconds until a new picker has 0.9 of the entries |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    asyncio.run(_over_redis())


if __name__ == "__main__":
    main()
