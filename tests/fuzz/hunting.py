"""Hunts for inputs that hold the event loop for long. It counts the lines of Python that an input runs, and
changes the worst inputs further. What is asserted needs no clock, so a busy machine finds the same inputs. C
code runs no lines, so a second entry gets the same inputs without counting: the slowest for its size is kept
to be printed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from tests.fuzz.entry import Entry
from tests.fuzz.mutating import mutants
from tests.fuzz.run import kept_inputs, quiet
from tests.fuzz.trees import changed
from tests.harness.steps import steps

HUNTED: Final = {
    # A frame of nine bytes runs some 120 lines. The buckets of `http2.limits` bound the frames a second.
    "http2": 16_000,
    # Header fields with unusual names run 2,000 lines a KiB, some 0.2 ms.
    **dict.fromkeys(("ext_proc", "access_log", "metrics_page", "model_page"), 4_000),
    **dict.fromkeys(("peer_batches", "stored_table", "kv_events", "picker_pages"), 4_000),
}
"""The lines that an input may run for each KiB, at each entry that hands an input to the event loop at once.
Files of the operator are read in a thread, and answers come in pieces.
"""
_BASE_LINES: Final = 2_000
"""Lines that any input may run. A usual request runs 700."""
_KEPT: Final = 6


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    share: float
    """Lines, as a share of those that an input of this size may run."""
    lines: int
    data: bytes
    cpu_ms: float
    """CPU that the input took, C included. It decides nothing."""

    @property
    def ms_a_kib(self) -> float:
        return self.cpu_ms / (1 + len(self.data) / 1024)


async def hunt(name: str, make: Callable[[], Entry], *, seed: int, inputs: int) -> tuple[Cost, Cost]:
    """Return the input with the most lines and the slowest one. Inputs that failed once are tried too."""
    entry = make()
    cost_of = Costs(entry, make(), lines_a_kib=HUNTED.get(name, 4_000))
    rng = random.Random(f"{name} {seed}")
    seeds = [*entry.seeds, *kept_inputs(name)]
    bases, documents = [*seeds], [*entry.documents]
    made = mutants(rng, bases, words=entry.words)
    of_bytes = [cost_of(data) for data in seeds]
    slowest = max(of_bytes, key=lambda cost: cost.ms_a_kib)
    of_documents: list[tuple[Cost, object]] = []
    with quiet():
        for number in range(inputs):
            if number % 2 or not documents:
                cost = cost_of(made())
                slowest = max(slowest, cost, key=lambda cost: cost.ms_a_kib)
                of_bytes = sorted([cost, *of_bytes], reverse=True)[:_KEPT]
                bases[len(seeds) :] = [cost.data for cost in of_bytes]
                continue
            document, data = changed(rng, rng.choice(documents), entry.encode)
            if data is not None:
                cost = cost_of(data)
                slowest = max(slowest, cost, key=lambda cost: cost.ms_a_kib)
                of_documents.append((cost, document))
                of_documents = sorted(of_documents, key=lambda pair: pair[0], reverse=True)[:_KEPT]
                documents[len(entry.documents) :] = [document for _, document in of_documents]
        await entry.check()
    return max([*of_bytes, *(cost for cost, _ in of_documents)]), slowest


@dataclass(frozen=True, slots=True)
class Costs:
    """Feeds each input to two entries: one counts lines, the other takes the time."""

    counted: Entry
    timed: Entry
    lines_a_kib: int

    def __call__(self, data: bytes) -> Cost:
        lines = steps(lambda: _run(self.counted.feed(data)))
        began_s = time.thread_time()  # noqa: TID251 - printed only
        _run(self.timed.feed(data))
        cpu_ms = 1000 * (time.thread_time() - began_s)  # noqa: TID251 - printed only
        return Cost(lines / (_BASE_LINES + self.lines_a_kib * len(data) / 1024), lines, data, cpu_ms)


def _run(feeding: Coroutine[Any, Any, bool]) -> None:
    try:
        while True:
            feeding.send(None)
    except StopIteration:
        return
