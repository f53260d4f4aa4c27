"""Random events, prompts, losses and findings, compared with a simple record of who holds what.

Only the findings write into a real prefix table. What the table says of a chain is then what the servers
hold of it.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import Chunks, PolicySpec, Table
from epp.picker.prefix_index.reported import UNDER_WAY_S
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.prefix_index.upkeep import add_endpoint
from epp.picker.server_caches import ServerCaches, hash_chain
from epp.sources.kvevents.decoding import TIERS, BlockName, Cleared, Removed, Stored
from epp.sources.kvevents.exact import Exact
from epp.sources.kvevents.knowledge import MappedPrompt
from tests.invariants.kvevents import check_exact
from tests.invariants.table import check_table

CHUNK, BLOCK = 16, 6
"""Characters, so that a chunk completes two or three blocks, and most blocks straddle a chunk's end."""
SPEC = PolicySpec(
    chunks=Chunks(size_bytes=CHUNK, later_size_bytes=CHUNK, later_from_bytes=0),
    table=Table(max_entries=10**6),
)
SERVERS = [EndpointName(n) for n in ("a", "b", "c")]

servers = st.sampled_from(SERVERS)
tiers = st.integers(0, TIERS - 1)


@st.composite
def prompts(draw: st.DrawFn) -> bytes:
    """Make prompts with shared beginnings. They differ from the end of a chunk on, or from its middle."""
    parts = draw(st.lists(st.sampled_from(["s" * 16, "t" * 16, "u" * 5, "v" * 29]), min_size=1, max_size=4))
    return "".join(parts).encode()


def blocks_of(prompt: bytes) -> list[BlockName]:
    return [BlockName(hash(prompt[: end + BLOCK])) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]


class KnowledgeMachine(RuleBasedStateMachine):
    max_chunks = 1000

    @initialize(complete=st.booleans())
    def start(self, *, complete: bool) -> None:
        self.now = 1000.0
        self.exact = Exact({}, max_blocks=10**6, max_chunks=self.max_chunks)
        self.mirrors = ServerCaches(SPEC, secret=HashSecret())
        self.copies: dict[EndpointName, dict[int, Counter[BlockName]]] = {}
        self.mapped: dict[bytes, list[ChunkHash]] = {}
        for name in SERVERS:
            self.exact.add(name, model="m")
            self.exact.known[name].complete = complete
            add_endpoint(self.mirrors.table, name, capacity_bytes=10**9)
            self.copies[name] = {tier: Counter() for tier in range(TIERS)}

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(prompt=prompts())
    def a_prompt_is_routed(self, prompt: bytes) -> None:
        chain = hash_chain(prompt, seed=1, schedule=self.mirrors.table.schedule)
        ends = [(k + 1) * CHUNK for k in range(len(chain))]
        blocks = blocks_of(prompt)
        self.mapped[prompt] = chain
        self.exact.look_up(MappedPrompt(chain, blocks, [end // BLOCK for end in ends]), now=self.tick())

    @rule(name=servers, prompt=prompts(), tier=tiers)
    def a_prompt_is_stored(self, name: EndpointName, prompt: bytes, tier: int) -> None:
        blocks = blocks_of(prompt)
        self.copies[name][tier].update(blocks)
        self.exact.learn(name, Stored(tuple(blocks), tier), now=self.tick())

    @rule(name=servers, prompt=prompts(), tier=tiers, keep=st.integers(0, 12))
    def its_end_is_evicted(self, name: EndpointName, prompt: bytes, tier: int, keep: int) -> None:
        blocks = blocks_of(prompt)[keep:]
        self.copies[name][tier] -= Counter(blocks)
        self.exact.learn(name, Removed(tuple(reversed(blocks)), tier), now=self.tick())

    @rule(name=servers, prompt=prompts(), tier=tiers, index=st.integers(0, 12))
    def any_block_is_evicted(self, name: EndpointName, prompt: bytes, tier: int, index: int) -> None:
        blocks = blocks_of(prompt)[index : index + 1]
        self.copies[name][tier] -= Counter(blocks)
        self.exact.learn(name, Removed(tuple(blocks), tier), now=self.tick())

    @rule(name=servers)
    def a_server_clears(self, name: EndpointName) -> None:
        self.copies[name] = {tier: Counter() for tier in range(TIERS)}
        self.exact.learn(name, Cleared(), now=self.tick())

    @rule()
    def findings_are_taken_in(self) -> None:
        self.mirrors.take_in(self.exact.findings(now=self.now))
        self.table_agrees()

    def table_agrees(self, *, exactly: bytes | None = None) -> None:
        """Each prompt is believed where it is held at most. exactly: this one wherever it is held."""
        for prompt, chain in self.mapped.items():
            believed = self.mirrors.table.match(chain)
            for name in SERVERS:
                held = self.held_chunks(name, prompt)
                assert believed.get(name, 0) <= held
                assert believed.get(name, 0) == held or prompt != exactly

    @rule(prompt=prompts())
    def a_prompt_is_routed_and_looked_up_at_once(self, prompt: bytes) -> None:
        self.a_prompt_is_routed(prompt)
        self.mirrors.take_in(self.exact.findings(now=self.now))
        self.table_agrees(exactly=prompt)

    def holds(self, name: EndpointName, block: BlockName) -> bool:
        return any(copies[block] > 0 for copies in self.copies[name].values())

    def held_chunks(self, name: EndpointName, prompt: bytes) -> int:
        """Return the chunks whose whole blocks the server holds, with all blocks before them; none while
        there is no whole block.
        """
        blocks = blocks_of(prompt)
        held = next((n for n, b in enumerate(blocks) if not self.holds(name, b)), len(blocks))
        full = len(prompt) // CHUNK
        return next((k for k in range(full) if (k + 1) * CHUNK // BLOCK > held), full)

    @precondition(lambda self: hasattr(self, "exact"))
    @invariant()
    def invariants_hold(self) -> None:
        check_exact(self.exact)
        check_table(self.mirrors.table)


TestKnowledge = pytest.mark.slow(KnowledgeMachine.TestCase)
TestKnowledge.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class BoundedMachine(KnowledgeMachine):
    """The same machine with room for few chunks. Forgotten chunks are neither credited nor removed, and
    nothing fails.
    """

    max_chunks = 5

    def table_agrees(self, *, exactly: bytes | None = None) -> None:
        """Nothing to compare: the servers are forgotten again and again."""

    @rule(name=servers)
    def findings_are_taken_in(self, name: EndpointName = SERVERS[0]) -> None:
        self.now += 2 * UNDER_WAY_S
        self.mirrors.take_in(self.exact.findings(now=self.now))
        self.exact.forget(name)


TestBounded = pytest.mark.slow(BoundedMachine.TestCase)
TestBounded.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
