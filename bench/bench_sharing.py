"""Measures what sharing costs: bytes and CPU for each request.

`python -m bench.bench_sharing`. Four pickers in one process share over a channel without delay. The CPU is
that of this process: for collecting and sending at the picker that routed, and for receiving at one other
picker. The prompts are turns of conversations over 8 shared system prompts, as in a chat.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.unit.sources.sharing.pickers import Replica, endpoints, meet

REQUESTS = 2000
SIZES = (1_000, 40_000, 400_000)
REPLICAS = 4
POOL = "abcdefgh"
PER_BATCH = 4
"""Requests that one picker routes in a flush interval, at 80 requests a second."""


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


def measure(size: int) -> None:
    """Print what sharing costs: each replica receives the batches of all others at once."""
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{REPLICAS} pickers, batches of {PER_BATCH} requests\n")
    print(
        "| prompt | bytes sent for each request | CPU to send, us | CPU to receive at each other picker, us |"
    )
    print("| --- | --- | --- | --- |")
    for size in SIZES:
        measure(size)


if __name__ == "__main__":
    main()
