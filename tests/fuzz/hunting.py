"""Hunts for inputs that hold the event loop for long, and changes the worst inputs further. A hunt counts the
lines of Python that an input runs, so a busy machine finds the same inputs. C code runs no lines.
"""

import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from tests.fuzz.entry import Entry
from tests.fuzz.mutating import mutants
from tests.fuzz.run import kept_inputs, quiet
from tests.fuzz.trees import changed
from tests.harness.steps import steps

HUNTED: Final = {
    # A frame of nine bytes runs some 120 lines. A byte of a header block may be a whole field, for which
    # hpack runs some 60. Buckets of `http2.streams` bound the frames a second, 16 KiB bound a block's fields.
    "http2": 64_000,
    # Header fields with unusual names run 2,000 lines a KiB, some 0.2 ms.
    **dict.fromkeys(("ext_proc", "access_log", "metrics_page", "model_page"), 4_000),
    **dict.fromkeys(("peer_batches", "kv_events"), 4_000),
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
    """The lines' share of those that an input of this size may run."""
    lines: int
    data: bytes


def cost_of(name: str, entry: Entry, data: bytes) -> Cost:
    lines = steps(lambda: _run(entry.feed(data)))
    return Cost(lines / (_BASE_LINES + HUNTED.get(name, 4_000) * len(data) / 1024), lines, data)


async def hunt(name: str, entry: Entry, *, seed: int, inputs: int) -> Cost:
    """Return the worst input. Inputs that were kept are tried first."""
    rng = random.Random(f"{name} {seed}")
    seeds = [*entry.seeds, *kept_inputs(name)]
    bases, documents = [*seeds], [*entry.documents]
    made = mutants(rng, bases, words=entry.words)
    of_bytes = sorted((cost_of(name, entry, data) for data in seeds), reverse=True)
    of_documents = list[tuple[Cost, object]]()
    with quiet():
        for number in range(inputs):
            if number % 2 or not documents:
                of_bytes = sorted([cost_of(name, entry, made()), *of_bytes], reverse=True)[:_KEPT]
                bases[len(seeds) :] = [cost.data for cost in of_bytes]
                continue
            document, data = changed(rng, rng.choice(documents), entry.encode)
            if data is not None:
                of_documents.append((cost_of(name, entry, data), document))
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
