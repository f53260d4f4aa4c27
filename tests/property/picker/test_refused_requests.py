"""A request that its server refuses, cuts or never answers leaves the picker as if it had never come.

Two pickers get the same requests, pages and answers. One of them also gets requests that come to nothing. As
soon as none of these is open, both believe and have learned the same. While one is open, it may match for
others, take the room of other guesses, and load an adapter that others wait for, so requests that it would
change are left out here. A page that comes meanwhile may count it as work of the server, so no page comes
then.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import Chunks, Lora, PolicySpec, Table
from epp.observe.misses import Misses
from epp.picker.decision import Outcome
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import Mirror, Run
from epp.picker.scheduling.least_cost import Demand, LeastCost
from tests.invariants.picker import check_demand, check_picker
from tests.unit.picker.picker_questions import A, B, a_picker, ask

SERVERS = {A: EndpointName("a"), B: EndpointName("b")}
SPEC = PolicySpec(
    chunks=Chunks(size_bytes=64),
    lora=Lora(slots_per_endpoint=1),
    table=Table(default_capacity_tokens=500),
)
PIECES = [random.Random(n).randbytes(150).hex().encode() for n in range(4)]

prompts = st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)
models = st.sampled_from(["m", "x", "y"])
addresses = st.sampled_from([A, B])


@dataclass
class Served:
    """What one server counts."""

    prompts: int = 0
    tokens: float = 0.0
    hits: float = 0.0
    finished: int = 0


@dataclass(eq=False)
class Good:
    picks: tuple[Pick, Pick]
    answered: bool = False


def new_picker() -> tuple[Picker, Misses]:
    on = [Endpoint(name, address, model="m", adapters=frozenset("xy")) for address, name in SERVERS.items()]
    picker = a_picker(SPEC, on=on)
    misses = Misses(picker)
    picker.subscribe(misses.on_event)
    return picker, misses


class RefusalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.attacked, self.spared = new_picker(), new_picker()
        self.good: list[Good] = []
        self.vain: list[Pick] = []
        self.served = {name: Served() for name in SERVERS.values()}

    @property
    def pickers(self) -> tuple[Picker, Picker]:
        return self.attacked[0], self.spared[0]

    # -- requests that come to nothing -----------------------------------------------------------------------

    @rule(prompt=prompts, model=models, address=addresses, stream=st.booleans(), count=st.integers(1, 4))
    def a_request_comes_in_vain(
        self, *, prompt: bytes, model: str, address: Address, stream: bool, count: int
    ) -> None:
        for _ in range(count):
            question = ask(prompt, model=model, stream=stream, subset=frozenset({address}))
            self.vain.append(self.pickers[0].pick(question, now=self.now))

    @precondition(lambda self: self.vain)
    @rule(data=st.data(), status=st.sampled_from([307, 400, 404, 413, 429, 500]), elsewhere=st.booleans())
    def it_is_refused(self, *, data: st.DataObject, status: int, elsewhere: bool) -> None:
        pick = self.vain.pop(data.draw(st.integers(0, len(self.vain) - 1)))
        served = (B if pick.destinations[0] == A else A) if elsewhere else None
        self.pickers[0].on_response_headers(pick, status=status, served=served, now=self.now)
        self.pickers[0].end(pick, outcome="ended", now=self.now)

    @precondition(lambda self: self.vain)
    @rule(data=st.data(), outcome=st.sampled_from(["aborted", "failed"]), headers=st.booleans())
    def it_ends_before_its_first_token(self, *, data: st.DataObject, outcome: Outcome, headers: bool) -> None:
        """The headers of a stream may have come: servers send them before they compute."""
        pick = self.vain.pop(data.draw(st.integers(0, len(self.vain) - 1)))
        if headers and pick.streams and pick.state.metrics is not None:
            self.pickers[0].on_response_headers(pick, status=200, served=None, now=self.now)
        self.pickers[0].end(pick, outcome=outcome, now=self.now)

    # -- requests that are answered --------------------------------------------------------------------------

    @rule(prompt=prompts, model=models, address=addresses, stream=st.booleans())
    def a_request_comes(self, *, prompt: bytes, model: str, address: Address, stream: bool) -> None:
        question = ask(prompt, model=model, stream=stream, subset=frozenset({address}))
        chain = self.pickers[0].caches.chain(question.inference)
        tables = [picker.caches.table for picker in self.pickers]
        mirror = tables[0].mirrors[SERVERS[address]]
        room = 2 * (mirror.guessed_bytes + tables[0].size_bytes(0, len(chain))) <= mirror.capacity_bytes
        states = [state for each in self.pickers for state in each.fleet.states()]
        held = {model in state.loaded_adapters for state in states if state.endpoint.name == SERVERS[address]}
        same = len(held) == 1 and tables[0].match(chain) == tables[1].match(chain)
        if same and (room or not self.vain):
            one, other = (picker.pick(question, now=self.now) for picker in self.pickers)
            one.sampled = other.sampled  # the first answer of a server is read, whoever asked for it
            self.good.append(Good((one, other)))

    @precondition(lambda self: any(not good.answered for good in self.good))
    @rule(data=st.data(), elsewhere=st.booleans())
    def it_is_answered(self, *, data: st.DataObject, elsewhere: bool) -> None:
        good = data.draw(st.sampled_from([good for good in self.good if not good.answered]))
        good.answered = True
        served = (B if good.picks[0].destinations[0] == A else A) if elsewhere and not self.vain else None
        for picker, pick in zip(self.pickers, good.picks, strict=True):
            picker.on_response_headers(pick, status=200, served=served, now=self.now)

    @precondition(lambda self: any(good.answered for good in self.good))
    @rule(data=st.data(), outcome=st.sampled_from(["ended", "ended", "aborted", "failed"]))
    def it_ends(self, *, data: st.DataObject, outcome: Outcome) -> None:
        good = data.draw(st.sampled_from([good for good in self.good if good.answered]))
        self.good.remove(good)
        name = good.picks[0].state.endpoint.name
        self.served[name].prompts += 1
        self.served[name].tokens += good.picks[0].prompt.tokens
        self.served[name].hits += good.picks[1].decision.matched_tokens // 2
        self.served[name].finished += 1
        for picker, pick in zip(self.pickers, good.picks, strict=True):
            picker.end(pick, outcome=outcome, now=self.now)

    # -- time and pages --------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for picker in self.pickers:
            picker.housekeep(now=self.now)

    @precondition(lambda self: not self.vain)
    @rule(name=st.sampled_from(list(SERVERS.values())))
    def a_page_comes(self, name: EndpointName) -> None:
        here = [good for good in self.good if good.picks[0].state.endpoint.name == name]
        served = self.served[name]
        page = EndpointMetrics(
            scraped_at=self.now,
            running=len(here),
            waiting=0,
            block_size=16,
            prompt_tokens=served.tokens,
            cached_prompt_tokens=served.hits,
            prefix_queries=served.tokens,
            prefix_hits=served.hits,
            generated_tokens=10.0 * served.finished,
            finished=float(served.finished),
            ttft_count=float(served.prompts),
            ttft_sum_s=0.3 * served.prompts,
        )
        for picker in self.pickers:
            picker.news.observe(name, page, now=self.now)

    # -- what has to hold ------------------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        for picker in self.pickers:
            check_picker(picker)
            check_demand(demand_of(picker))

    @invariant()
    def nothing_that_is_proven_differs(self) -> None:
        """Not even while requests are open that come to nothing."""
        one, other = self.pickers
        for name in SERVERS.values():
            assert held(one.caches.table.mirrors[name]) == held(other.caches.table.mirrors[name])

    @precondition(lambda self: not self.vain)
    @invariant()
    def nothing_is_left_of_the_requests_that_came_in_vain(self) -> None:
        one, other = (
            dict(beliefs(picker, misses, now=self.now)) for picker, misses in (self.attacked, self.spared)
        )
        for name in one:
            assert one[name] == other[name], (name, one[name], other[name])

    @precondition(lambda self: not (self.good or self.vain))
    @invariant()
    def no_guess_outlives_its_request(self) -> None:
        """But for answers that may have had no token, until the server's next page."""
        for picker in self.pickers:
            assert picker.caches.table.guessed_entries == 0
            doubted = picker.guesses._doubted  # noqa: SLF001 - nothing else asks for it
            assert not any(s.expected_adapters for s in picker.fleet.states() if s not in doubted)


def held(mirror: Mirror) -> object:
    """Return what is proven, from the least to the most recently used."""
    uses = [(use.at, hashes(use.leaf)) for use in mirror.uses]
    return uses, mirror.used_bytes, mirror.entries, mirror.evicted, mirror.capacity_bytes


def hashes(run: Run | None) -> list[int]:
    return [] if run is None else [*hashes(run.parent), *run.hashes]


LOAD = frozenset(
    {"picks_since_scrape", "ends_since_scrape", "backlog", "changed", "expected_adapters", "account"}
)
"""Fields of a server's state that say how busy it is and whether it answers well, or that only notify."""


def demand_of(picker: Picker) -> Demand:
    (rule,) = picker.guesses.rules
    assert isinstance(rule, LeastCost)
    return rule.demand


def beliefs(picker: Picker, misses: Misses, *, now: float) -> Iterator[tuple[str, object]]:
    """Yield everything that is learned, by name."""
    misses.work(steps=10**9)
    for part in (
        misses.over(1e12, now=now),
        misses.seen,
        demand_of(picker),
        picker.caches.token_estimate("m"),
    ):
        yield type(part).__name__, plain(part)
    for state in picker.fleet.states():
        name = state.endpoint.name
        yield f"{name} work", [booking.tokens for booking in state.backlog.bookings]
        for field in dataclasses.fields(state):
            if field.name not in LOAD:
                yield f"{name} {field.name}", plain(getattr(state, field.name))


def plain(value: Any, *around: object) -> object:
    """Return a value in which every object is replaced by its fields, whatever they are. around: the objects
    that this value is in.
    """
    if isinstance(value, dict):
        return [(plain(key, *around), plain(each, *around)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return [plain(each, *around) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    kind = type(value)
    if not kind.__module__.startswith("epp."):
        return value
    if any(value is each for each in around):
        return kind
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    return [(name, plain(getattr(value, name), value, *around)) for name in names or vars(value)]


TestRefusals = pytest.mark.slow(RefusalMachine.TestCase)
TestRefusals.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
