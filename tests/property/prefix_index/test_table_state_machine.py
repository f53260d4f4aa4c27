"""The table compared with the simplest model: one ordered dict of chunks for each server."""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import Chunks
from epp.picker.events import GuessedEntries
from epp.picker.guesses import GUESSED_SHARE, drop_guess, guess_chain
from epp.picker.prefix_index.reported import credit
from epp.picker.prefix_index.table import PrefixTable, end_bytes
from epp.picker.prefix_index.upkeep import (
    add_endpoint,
    clear_endpoint,
    drop_endpoint,
    evict,
    forget,
    resize,
)
from epp.picker.server_caches import hash_chain
from tests.invariants.table import check_table

SCHEDULE = Chunks(size_bytes=1, later_size_bytes=3, later_from_bytes=4)
UNLIMITED = 10**9

names = st.sampled_from([EndpointName(n) for n in ("a", "b", "c", "d")])
capacities = st.integers(min_value=0, max_value=60)
steps_s = st.sampled_from([0.001, 0.001, 1.0, 20.0])


@st.composite
def prompts(draw: st.DrawFn) -> bytes:
    """Make prompts of few letters with popular beginnings. They share a lot and diverge at many places."""
    start = draw(st.sampled_from(["", "xxxx", "xxxxyyyzzz", "xxxxyyyzzzxxxyyyzzz"]))
    rest = draw(st.text(alphabet="xyz", max_size=12))
    return (start + rest).encode()


@dataclass
class Item:
    """A chunk in the model's cache."""

    size_bytes: int
    at: float
    op: int


@dataclass
class CacheModel:
    capacity_bytes: int
    items: OrderedDict[int, Item] = field(default_factory=OrderedDict)
    """The least recently used comes first."""
    guesses: list[list[ChunkHash]] = field(default_factory=list)
    evicted: int = 0

    def only_guessed(self) -> set[ChunkHash]:
        return {h for chain in self.guesses for h in chain} - self.items.keys()

    def used_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items.values())

    def chunks(self) -> set[int]:
        return set(self.items)

    def evict_one(self) -> None:
        del self.items[next(iter(self.items))]
        self.evicted += 1


@dataclass
class ModelGuess:
    server: CacheModel
    chain: list[ChunkHash]


class Model:
    def __init__(self, *, max_entries: int) -> None:
        self.servers: dict[EndpointName, CacheModel] = {}
        self.max_entries = max_entries
        self.op = itertools.count()
        self.parents: dict[int, int] = {}
        """For every chunk that was ever recorded: the chunk before it."""
        self.sizes: dict[ChunkHash, int] = {}

    def match(self, chain: list[ChunkHash]) -> dict[EndpointName, int]:
        found = {}
        for name, server in self.servers.items():
            known = server.chunks() | server.only_guessed()
            held = len(list(itertools.takewhile(known.__contains__, chain)))
            if held:
                found[name] = held
        return found

    def proven(self, name: EndpointName, chain: list[ChunkHash]) -> int:
        return len(list(itertools.takewhile(self.servers[name].items.__contains__, chain)))

    def guess(self, name: EndpointName, chain: list[ChunkHash]) -> ModelGuess:
        """Write what fits: chunks that the server holds already take no room."""
        server = self.servers[name]
        sizes = [end_bytes(SCHEDULE, n + 1) - end_bytes(SCHEDULE, n) for n in range(len(chain))]
        size_of = dict(zip(chain, sizes, strict=True))
        room_bytes = int(GUESSED_SHARE * server.capacity_bytes) - sum(
            self.sizes[h] for h in server.only_guessed()
        )
        room = int(GUESSED_SHARE * self.max_entries) - sum(
            len(s.only_guessed()) for s in self.servers.values()
        )
        self.sizes.update(size_of)
        held, taken = self.match(chain).get(name, 0), 0
        fits = held
        for h in chain[held:]:
            taken += size_of[h]
            if taken > room_bytes or fits - held >= room:
                break
            fits += 1
        written = ModelGuess(server, chain[:fits] if sum(sizes) <= server.capacity_bytes else [])
        server.guesses.append(written.chain)
        return written

    def drop(self, guessed: ModelGuess) -> None:
        kept = [chain for chain in guessed.server.guesses if chain is not guessed.chain]
        guessed.server.guesses = kept

    def record(self, name: EndpointName, chain: list[ChunkHash], *, now: float) -> list[ChunkHash]:
        server, op = self.servers[name], next(self.op)
        self.parents.update((b, a) for a, b in itertools.pairwise(chain))
        added = [h for h in chain if h not in server.items]
        # The tail is put in first, so that it is evicted first.
        for n, h in reversed(list(enumerate(chain))):
            size_bytes = end_bytes(SCHEDULE, n + 1) - end_bytes(SCHEDULE, n)
            server.items[h] = Item(size_bytes=size_bytes, at=now, op=op)
            server.items.move_to_end(h)
        return added

    def touch(self, name: EndpointName, chain: list[ChunkHash], *, now: float) -> None:
        self.record(name, chain[: self.proven(name, chain)], now=now)

    def credit(self, name: EndpointName, chain: list[ChunkHash], *, now: float) -> bool:
        server, op = self.servers[name], next(self.op)
        self.parents.update((b, a) for a, b in itertools.pairwise(chain))
        held = self.proven(name, chain)
        size_bytes = end_bytes(SCHEDULE, len(chain)) - end_bytes(SCHEDULE, held)
        if not size_bytes or server.used_bytes() + size_bytes > server.capacity_bytes:
            return False
        at = next(iter(server.items.values())).at if server.items else now
        for n in range(held, len(chain)):  # The tail is freed last, so that it is evicted first.
            size_bytes = end_bytes(SCHEDULE, n + 1) - end_bytes(SCHEDULE, n)
            server.items[chain[n]] = Item(size_bytes=size_bytes, at=at, op=op)
            server.items.move_to_end(chain[n], last=False)
        return True

    def forget(self, name: EndpointName, chain: list[ChunkHash], *, keep: int, as_of: float) -> int:
        items = self.servers[name].items
        item = items.get(chain[keep]) if keep < len(chain) else None
        if item is None or item.at > as_of:
            return 0
        gone = [h for h in self.servers[name].chunks() if chain[keep] in self.upwards(h)]
        for h in gone:
            del items[h]
        return len(gone)

    def upwards(self, chunk: int) -> set[int]:
        found = {chunk}
        while (above := self.parents.get(chunk)) is not None:
            chunk = above
            found.add(chunk)
        return found

    def evict(self) -> None:
        for server in self.servers.values():
            while server.used_bytes() > server.capacity_bytes:
                server.evict_one()
        while sum(len(s.chunks()) for s in self.servers.values()) > self.max_entries:
            oldest = min(
                (s for s in self.servers.values() if s.items), key=lambda s: next(iter(s.items.values())).at
            )
            oldest.evict_one()


Handle = tuple[EndpointName, list[ChunkHash], GuessedEntries | None, ModelGuess]


class TableMachine(RuleBasedStateMachine):
    handles: Bundle[Handle] = Bundle("handles")
    seen: Bundle[bytes] = Bundle("seen")

    @initialize(max_entries=st.integers(min_value=0, max_value=60))
    def start(self, max_entries: int) -> None:
        self.now = 0.0
        self.table = PrefixTable(schedule=SCHEDULE, max_entries=max_entries)
        self.model = Model(max_entries=max_entries)
        for name in ("a", "b"):
            add_endpoint(self.table, EndpointName(name), capacity_bytes=40)
            self.model.servers[EndpointName(name)] = CacheModel(capacity_bytes=40)

    def tick(self, step_s: float) -> float:
        # Times differ between any two uses. The total bound has no order for servers with equal times.
        self.now += step_s
        return self.now

    def chain(self, prompt: bytes) -> list[ChunkHash]:
        return hash_chain(prompt, seed=7, schedule=SCHEDULE)

    def live(self, name: EndpointName) -> bool:
        return name in self.model.servers

    @rule(target=seen, prompt=prompts())
    def think_of_a_prompt(self, prompt: bytes) -> bytes:
        return prompt

    @rule(name=names, prompt=prompts() | seen, step_s=steps_s)
    def record(self, name: EndpointName, prompt: bytes, step_s: float) -> None:
        self.prove(name, self.chain(prompt), None, step_s=step_s)

    def prove(
        self, name: EndpointName, chain: list[ChunkHash], guessed: GuessedEntries | None, *, step_s: float
    ) -> None:
        now = self.tick(step_s)
        held = self.table.record(name, chain, now=now)
        drop_guess(self.table, guessed)
        added = self.model.record(name, chain, now=now) if self.live(name) else []
        assert added == ([] if held is None else chain[held:])

    @rule(target=handles, name=names, prompt=prompts() | seen)
    def guess(self, name: EndpointName, prompt: bytes) -> Handle | MultipleResults[Handle]:
        chain = self.chain(prompt)
        guessed = guess_chain(self.table, name, chain)
        if not self.live(name):
            assert guessed is None
            return multiple()
        return name, chain, guessed, self.model.guess(name, chain)

    @rule(handle=consumes(handles), step_s=steps_s)
    def guess_proves_true(self, handle: Handle, step_s: float) -> None:
        name, chain, guessed, expected = handle
        self.model.drop(expected)
        self.prove(name, chain, guessed, step_s=step_s)

    @rule(handle=consumes(handles))
    def guess_is_dropped(self, handle: Handle) -> None:
        drop_guess(self.table, handle[2])
        self.model.drop(handle[3])

    @rule(name=names, prompt=prompts() | seen, step_s=steps_s)
    def touch(self, name: EndpointName, prompt: bytes, step_s: float) -> None:
        now = self.tick(step_s)
        self.table.touch(name, self.chain(prompt), now=now)
        if self.live(name):
            self.model.touch(name, self.chain(prompt), now=now)

    @rule(name=names, prompt=prompts() | seen, step_s=steps_s)
    def credit(self, name: EndpointName, prompt: bytes, step_s: float) -> None:
        now, chain = self.tick(step_s), self.chain(prompt)
        credited = credit(self.table, name, chain, now=now)
        assert credited == (self.live(name) and self.model.credit(name, chain, now=now))

    @rule(
        name=names, prompt=prompts() | seen, keep=st.integers(0, 20), ago_s=st.sampled_from([0.0, 1.0, 20.0])
    )
    def forget(self, name: EndpointName, prompt: bytes, keep: int, ago_s: float) -> None:
        chain, as_of = self.chain(prompt), self.now - ago_s
        forgotten = forget(self.table, name, chain, keep=keep, as_of=as_of)
        expected = self.model.forget(name, chain, keep=keep, as_of=as_of) if self.live(name) else 0
        assert forgotten == expected

    @rule()
    def evict_at_once(self) -> None:
        evict(self.table, budget=UNLIMITED)
        self.model.evict()
        self.settled()

    @rule()
    def evict_in_small_portions(self) -> None:
        before = None
        while before != (before := self.sizes()):
            evict(self.table, budget=1)
            check_table(self.table)
        self.model.evict()
        self.settled()

    @rule(name=names, capacity_bytes=capacities)
    def resize(self, name: EndpointName, capacity_bytes: int) -> None:
        if self.live(name):
            resize(self.table, name, capacity_bytes=capacity_bytes)
            self.model.servers[name].capacity_bytes = capacity_bytes

    @rule(name=names, by_bytes=st.integers(min_value=1, max_value=8))
    def shrink_a_little(self, name: EndpointName, by_bytes: int) -> None:
        if self.live(name):
            smaller = max(0, self.table.mirrors[name].used_bytes - by_bytes)
            self.resize(name, smaller)
            self.evict_at_once()

    @rule(name=names, capacity_bytes=capacities)
    def add_endpoint(self, name: EndpointName, capacity_bytes: int) -> None:
        if not self.live(name):
            add_endpoint(self.table, name, capacity_bytes=capacity_bytes)
            self.model.servers[name] = CacheModel(capacity_bytes=capacity_bytes)

    @rule(name=names)
    def drop_endpoint(self, name: EndpointName) -> None:
        if self.live(name):
            drop_endpoint(self.table, name)
            del self.model.servers[name]

    @rule(name=names)
    def restart(self, name: EndpointName) -> None:
        if self.live(name):
            clear_endpoint(self.table, name)
            self.model.servers[name].items.clear()
            self.model.servers[name].guesses.clear()

    @rule(prompt=prompts() | seen)
    def match(self, prompt: bytes) -> None:
        assert self.table.match(self.chain(prompt)) == self.model.match(self.chain(prompt))

    def sizes(self) -> list[tuple[int, int]]:
        return [(self.table.mirrors[n].entries, self.table.mirrors[n].used_bytes) for n in self.table.mirrors]

    def settled(self) -> None:
        """After eviction every bound holds."""
        assert self.table.entries <= self.model.max_entries
        for name, server in self.model.servers.items():
            assert self.table.mirrors[name].used_bytes <= server.capacity_bytes

    @precondition(lambda self: hasattr(self, "table"))
    @invariant()
    def holds_what_the_model_holds(self) -> None:
        check_table(self.table)
        assert set(self.table.mirrors) == set(self.model.servers)
        assert self.table.entries == sum(len(s.chunks()) for s in self.model.servers.values())
        for name, server in self.model.servers.items():
            held = {h for run in self.table.mirrors[name].last_use for h in run.hashes}
            assert held == server.chunks()
            assert self.table.mirrors[name].entries == len(held)
            assert self.table.mirrors[name].used_bytes == server.used_bytes()
            assert self.table.mirrors[name].evicted == server.evicted
            guessed = {h for run in self.table.mirrors[name].guessed for h in run.hashes}
            assert guessed - held == server.only_guessed()


TestTable = pytest.mark.slow(TableMachine.TestCase)
TestTable.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
