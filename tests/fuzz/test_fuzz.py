"""Generated input at all entries, four million bytes each. Errors are typed, the state stays valid, and
the memory does not grow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.entries import ENTRIES
from tests.fuzz.hunting import HUNTED, hunt
from tests.fuzz.listening import LISTENING
from tests.fuzz.run import feed

BYTES = 4_000_000
"""Bytes for each entry: about a minute for all fourteen on one core."""
SEED = 1
INPUTS = 600
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
