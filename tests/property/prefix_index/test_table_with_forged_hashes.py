"""Clients that can make hashes collide get wrong matches at most."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import Chunks
from epp.picker.guesses import drop_guess, guess_chain
from epp.picker.prefix_index.table import PrefixTable
from epp.picker.prefix_index.upkeep import add_endpoint, clear_endpoint, evict
from tests.invariants.table import check_table

SCHEDULE = Chunks(size_bytes=1, later_size_bytes=2, later_from_bytes=3)
NAMES = [EndpointName("a"), EndpointName("b")]

chains = st.lists(st.integers(min_value=0, max_value=4).map(ChunkHash), max_size=8)
steps = st.tuples(
    st.sampled_from(["record", "record", "guess", "drop", "touch", "evict", "clear"]),
    st.sampled_from(NAMES),
    chains,
)


@pytest.mark.slow
@given(script=st.lists(steps, max_size=40), capacity_bytes=st.integers(min_value=0, max_value=20))
@settings(max_examples=200, deadline=None)
def test_no_sequence_of_forged_chains_breaks_the_table(
    script: list[tuple[str, EndpointName, list[ChunkHash]]], capacity_bytes: int
) -> None:
    table = PrefixTable(schedule=SCHEDULE, max_entries=12)
    for name in NAMES:
        add_endpoint(table, name, capacity_bytes=capacity_bytes)
    guesses = []
    for now, (step, name, chain) in enumerate(script):
        if step == "record":
            held = table.record(name, chain, now=now)
            assert table.match(chain).get(name, 0) >= (held or 0)
        elif step == "guess":
            guesses.append(guess_chain(table, name, chain))
        elif step == "touch":
            table.touch(name, chain, now=now)
        elif step == "drop" and guesses:
            drop_guess(table, guesses.pop(len(chain) % len(guesses)))
        elif step == "evict":
            evict(table)
            assert table.entries <= 12
            assert all(table.mirrors[n].used_bytes <= capacity_bytes for n in NAMES)
        elif step == "clear":
            clear_endpoint(table, name)
        check_table(table)
