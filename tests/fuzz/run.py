"""Feeds one entry until a number of bytes is reached, and checks the entry from time to time."""

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.entry import Entry
from tests.fuzz.mutating import mutants
from tests.fuzz.trees import tree_mutants
from tests.harness.steps import blocks

SEEDS: Final = Path(__file__).parent / "seeds"
_FOUND: Final = Path("build/fuzz")
_CHECK_EVERY: Final = 50
_DOCUMENTS: Final = 0.5
"""The share of inputs that are changed documents."""
_BLOCKS_AN_INPUT: Final = 4.0
"""Memory blocks by which an entry may grow for each input of the second half. Caches fill. Leaks are
larger.
"""


@dataclass(frozen=True, slots=True)
class Fed:
    inputs: int
    size_bytes: int
    refused: int
    grown_blocks: int


class FindingError(AssertionError):
    """An input had an effect that no input should have. The message says how to feed the input again."""


def kept_inputs(name: str) -> Sequence[bytes]:
    """Return inputs that failed once."""
    return [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]


async def feed(name: str, entry: Entry, *, seed: int, size_bytes: int) -> Fed:
    """Raises FindingError at the first input that raises anything but a typed error, or breaks an
    invariant.
    """
    with quiet():
        return await _feed(name, entry, seed=seed, size_bytes=size_bytes)


@contextmanager
def quiet() -> Iterator[None]:
    """Switch logs off, because nearly every input causes a warning."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


async def _feed(name: str, entry: Entry, *, seed: int, size_bytes: int) -> Fed:
    rng = random.Random(f"{name} {seed}")
    of_bytes = mutants(rng, entry.seeds, words=entry.words)
    of_documents = tree_mutants(rng, entry.documents, entry.encode) if entry.documents else None
    inputs = fed_bytes = refused = half_inputs = half_blocks = 0
    recent: list[bytes] = []
    for data in kept_inputs(name):
        await _feed_one(name, entry, data)
    while fed_bytes < size_bytes:
        data = (
            of_documents() if of_documents is not None and rng.random() < _DOCUMENTS else None
        ) or of_bytes()
        recent.append(data)
        refused += await _feed_one(name, entry, data)
        inputs += 1
        fed_bytes += len(data) + 1
        if inputs % _CHECK_EVERY == 0:
            await _check(name, entry, recent)
            recent.clear()
        if not half_inputs and fed_bytes >= size_bytes / 2:
            half_inputs, half_blocks = inputs, blocks()
    await _check(name, entry, recent)
    grown = blocks() - half_blocks
    allowed = _BLOCKS_AN_INPUT * (inputs - half_inputs) + 2_000
    assert grown <= allowed, f"{name} grew by {grown} blocks over {inputs - half_inputs} inputs"
    assert refused < inputs, (
        f"{name} refused every input, so the code behind the check of its input never ran"
    )
    return Fed(inputs, fed_bytes, refused, grown)


async def _feed_one(name: str, entry: Entry, data: bytes) -> bool:
    try:
        return not await entry.feed(data)
    except Exception as error:
        raise FindingError(_keep(name, [data], error)) from error


async def _check(name: str, entry: Entry, recent: Sequence[bytes]) -> None:
    try:
        await entry.check()
    except Exception as error:
        raise FindingError(_keep(name, recent, error)) from error


def _keep(name: str, inputs: Sequence[bytes], error: Exception) -> str:
    """Write the inputs into files. Return where they are, and what to do with them."""
    _FOUND.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (_FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
    fault = f"{name}: {type(error).__name__}: {error}"[:300]
    return f"{fault}; kept in {_FOUND}; move it to {SEEDS / name} once the fault is repaired"
