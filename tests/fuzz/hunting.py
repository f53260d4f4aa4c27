"""Hunts for inputs that hold the event loop for long, and changes the worst inputs further. There are two
hunts. One counts the lines of Python that an input runs. It needs no clock, so a busy machine finds the same
inputs, and a bound is asserted. C code runs no lines, so the other hunt goes by CPU time, C included. Its
worst inputs are printed, and those of long hunts are kept as seeds, which both hunts begin with.
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
    # A frame of nine bytes runs some 120 lines. The buckets of `http2.control` bound the frames a second.
    "http2": 16_000,
    # Header fields with unusual names run 2,000 lines a KiB, some 0.2 ms.
    **dict.fromkeys(("ext_proc", "access_log", "metrics_page", "model_page"), 4_000),
    **dict.fromkeys(("peer_batches", "kv_events", "picker_pages"), 4_000),
}
"""The lines that an input may run for each KiB, at each entry that hands an input to the event loop at once.
Files of the operator are read in a thread, and answers come in pieces.
"""
_BASE_LINES: Final = 2_000
"""Lines that any input may run. A usual request runs 700."""
_KEPT: Final = 6
_REPEATS: Final = 3


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    share: float
    """By lines: their share of those that an input of this size may run. By CPU: milliseconds for each KiB,
    and for 1 KiB more.
    """
    amount: float
    """Lines, or milliseconds of CPU."""
    data: bytes


Measure = Callable[[bytes, float], Cost]
"""Measures an input. The number is the share of the worst input so far."""


def by_lines(name: str, entry: Entry) -> Measure:
    a_kib = HUNTED.get(name, 4_000)

    def measured(data: bytes, _: float) -> Cost:
        lines = steps(lambda: _run(entry.feed(data)))
        return Cost(lines / (_BASE_LINES + a_kib * len(data) / 1024), lines, data)

    return measured


def by_cpu(entry: Entry, make: Callable[[], Entry]) -> Measure:
    """An input that seems to be the worst is measured again on new entries, and its least time counts."""

    def measured(data: bytes, least: float) -> Cost:
        cost = _cpu(entry, data)
        for _ in range(_REPEATS - 1):
            if cost.share <= least:
                break
            cost = min(cost, _cpu(make(), data))
        return cost

    return measured


def _cpu(entry: Entry, data: bytes) -> Cost:
    began_s = time.process_time()  # noqa: TID251 - it steers the hunt and is printed, no more
    _run(entry.feed(data))
    ms = 1000 * (time.process_time() - began_s)  # noqa: TID251 - as above
    return Cost(ms / (1 + len(data) / 1024), ms, data)


async def hunt(name: str, entry: Entry, measure: Measure, *, seed: int, inputs: int) -> Cost:
    """Return the worst input. Inputs that were kept are tried first."""
    rng = random.Random(f"{name} {seed}")
    seeds = [*entry.seeds, *kept_inputs(name)]
    bases, documents = [*seeds], [*entry.documents]
    made = mutants(rng, bases, words=entry.words)
    of_bytes = sorted((measure(data, 0.0) for data in seeds), reverse=True)
    of_documents = list[tuple[Cost, object]]()
    with quiet():
        for number in range(inputs):
            if number % 2 or not documents:
                of_bytes = sorted([measure(made(), of_bytes[0].share), *of_bytes], reverse=True)[:_KEPT]
                bases[len(seeds) :] = [cost.data for cost in of_bytes]
                continue
            document, data = changed(rng, rng.choice(documents), entry.encode)
            if data is not None:
                least = of_documents[0][0].share if of_documents else 0.0
                of_documents.append((measure(data, least), document))
                of_documents = sorted(of_documents, key=lambda pair: pair[0], reverse=True)[:_KEPT]
                documents[len(entry.documents) :] = [document for _, document in of_documents]
        await entry.check()
    return max([*of_bytes, *(cost for cost, _ in of_documents)])


def _run(feeding: Coroutine[Any, Any, bool]) -> None:
    try:
        while True:
            feeding.send(None)
    except StopIteration:
        return
