"""Generated input at all entries, ten million bytes each. Errors are typed, the state stays valid, and
the memory does not grow.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fuzz.behind import OfBytes
from tests.fuzz.entries import ENTRIES
from tests.fuzz.hunting import HUNTED, hunt
from tests.fuzz.listening import LISTENING
from tests.fuzz.mutating import MOST_BYTES, mutants
from tests.fuzz.run import SEEDS, FindingError, feed

BYTES = 10_000_000
"""Bytes for each entry: about two minutes for all seventeen on one core."""
SEED = 1
INPUTS = 200
"""Inputs of each hunt for costly ones."""


@pytest.mark.parametrize("name", ENTRIES)
async def test_generated_input_is_taken_or_refused_and_leaves_the_picker_sound(name: str) -> None:
    fed = await feed(name, ENTRIES[name](), seed=SEED, size_bytes=BYTES)
    print(
        f"{name}: {fed.inputs} inputs, {fed.size_bytes:,} bytes, {fed.refused} refused, {fed.grown_blocks} blocks"
    )


@pytest.mark.parametrize("name", HUNTED)
async def test_no_input_runs_more_lines_than_its_size_allows(name: str) -> None:
    worst = await hunt(name, ENTRIES[name](), seed=SEED, inputs=INPUTS)
    assert worst.share <= 1, (worst.lines, len(worst.data), worst.data[:300])


@pytest.mark.parametrize("name", LISTENING)
async def test_generated_input_on_a_connection_ends_at_most_that_connection(
    name: str, tmp_path: Path
) -> None:
    async with LISTENING[name](tmp_path) as entry:
        fed = await feed(name, entry, seed=SEED, size_bytes=BYTES)
    print(
        f"{name}: {fed.inputs} inputs, {fed.size_bytes:,} bytes, {fed.refused} refused, {fed.grown_blocks} blocks"
    )


def test_every_kept_input_belongs_to_an_entry() -> None:
    assert {path.name for path in SEEDS.iterdir() if path.is_dir()} <= {*ENTRIES, *LISTENING}


def test_a_seed_gives_the_same_inputs_again() -> None:
    makers = [mutants(random.Random(7), [b"abc", b"defg"], words=[b"x"]) for _ in range(2)]
    first, second = ([make() for _ in range(500)] for make in makers)
    assert first == second
    assert len(set(first)) > 300
    assert max(map(len, first)) <= MOST_BYTES


class Faulty(OfBytes):
    """Fails at one byte value, and keeps another in memory."""

    seeds: Sequence[bytes] = (b"abcdef" * 20,)
    words: Sequence[bytes] = ()

    def __init__(self) -> None:
        self.kept: list[list[bytes]] = []

    async def feed(self, data: bytes) -> bool:
        if b"\xff" in data:
            raise ZeroDivisionError
        if b"\xfe" not in data:
            self.kept.append([b"%d" % n for n in range(1000, 1010)])
        return True

    async def check(self) -> None: ...


class Leaking(Faulty):
    async def feed(self, data: bytes) -> bool:
        return await super().feed(data.replace(b"\xff", b""))


async def test_an_error_that_is_not_the_entrys_own_is_a_finding_and_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FindingError, match="ZeroDivisionError"):
        await feed("faulty", Faulty(), seed=1, size_bytes=500_000, folder=tmp_path / "found")
    assert any(b"\xff" in path.read_bytes() for path in (tmp_path / "found").iterdir())


async def test_growth_is_a_finding() -> None:
    with pytest.raises(AssertionError, match="leaking grew by"):
        await feed("leaking", Leaking(), seed=1, size_bytes=500_000)


class Costly(Faulty):
    """Runs a line for each pair of bytes of its input."""

    async def feed(self, data: bytes) -> bool:
        for first, second in itertools.product(data[:120], repeat=2):
            self.sum = first + second
        return True


async def test_work_that_grows_faster_than_the_input_is_found() -> None:
    worst = await hunt("costly", Costly(), seed=1, inputs=3)
    assert worst.share > 1
