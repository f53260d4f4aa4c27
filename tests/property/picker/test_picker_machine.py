"""Whatever happens in any order, one server holds each booking, each booking is released once, and nothing
leaks.

The machine knows for each open request which server holds its booking, and in which membership of that
server. From this it computes what every server has in flight.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epp.base.errors import NoEndpointError, SaturatedError
from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import Chunks, LoadSettings, Lora, PolicySpec, RuleName, Sampling, Table
from epp.picker.decision import Outcome, Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from tests.invariants.picker import check_picker, check_settled
from tests.unit.picker.picker_questions import policy_of

NAMES = [EndpointName(n) for n in "abcd"]
HOSTS = [Address(f"10.0.0.{i}", 8000) for i in range(1, 7)]
PIECES = [random.Random(n).randbytes(150).hex().encode() for n in range(4)]

prompts = st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)
addresses = st.sampled_from(HOSTS)
policies = st.builds(
    PolicySpec,
    rule=st.sampled_from(get_args(RuleName)),
    chunks=st.sampled_from([Chunks(), Chunks(size_bytes=64), Chunks(size_bytes=100, later_from_bytes=500)]),
    load=st.sampled_from(
        [
            LoadSettings(),
            LoadSettings(max_waiting=3, when_saturated="Reject"),
            LoadSettings(max_undone_tokens=300),
        ]
    ),
    lora=st.sampled_from([Lora(), Lora(slots_per_endpoint=1)]),
    table=st.sampled_from([Table(), Table(max_entries=1000, default_capacity_tokens=500)]),
    sampling=st.sampled_from([Sampling(), Sampling(share=1.0)]),
)
counts = st.none() | st.integers(0, 2000).map(float)


@dataclass(eq=False)
class OpenRequest:
    """An open request and the holder of its booking: a server in one of its memberships, or no known
    server.
    """

    pick: Pick
    holder: tuple[EndpointName, int] | None
    served: Address


class PickerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.picker = Picker(policy_of(PolicySpec()), rng=random.Random(0))
        self.memberships: Counter[EndpointName] = Counter()
        self.open: list[OpenRequest] = []
        self.over: list[Pick] = []

    @initialize()
    def begins_with_two(self) -> None:
        self.apply([Endpoint(NAMES[0], HOSTS[0]), Endpoint(NAMES[1], HOSTS[1])])

    def apply(self, wanted: list[Endpoint]) -> None:
        before = {e.name for e in self.picker.news.endpoints()}
        self.memberships.update(e.name for e in wanted if e.name not in before)
        self.picker.news.set_endpoints(wanted, now=self.now)
        assert {e.name: e for e in self.picker.news.endpoints()} == {e.name: e for e in wanted}

    # -- the world -------------------------------------------------------------------------------------------

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([-3600.0, 3600.0]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        members=st.lists(
            st.tuples(
                st.sampled_from(NAMES), addresses, st.sampled_from(["", "2"]), st.sampled_from(["", "m"])
            ),
            unique_by=(lambda m: m[0], lambda m: m[1]),
            max_size=4,
        ),
        adapters=st.sets(st.sampled_from(["x", "y"])),
    )
    def endpoints_change(
        self, members: list[tuple[EndpointName, Address, str, str]], adapters: set[str]
    ) -> None:
        self.apply(
            [
                Endpoint(name, address, incarnation=again, model=model, adapters=frozenset(adapters))
                for name, address, again, model in members
            ]
        )

    @precondition(lambda self: self.picker.news.endpoints())
    @rule(data=st.data(), address=addresses)
    def an_endpoint_moves(self, data: st.DataObject, address: Address) -> None:
        """Give an endpoint another address under the same name. The endpoint that had this address gets
        the old one.
        """
        present = self.picker.news.endpoints()
        moved = data.draw(st.sampled_from(present))
        swapped = {address: moved.address, moved.address: address}
        self.apply([replace(e, address=swapped.get(e.address, e.address)) for e in present])

    @rule(
        name=st.sampled_from(NAMES),
        running=st.integers(0, 5),
        waiting=st.integers(0, 5),
        counters=st.tuples(counts, counts, counts, counts, counts),
        capacity=st.none() | st.integers(0, 3000),
        active=st.sets(st.sampled_from(["x", "y", "z"])).map(frozenset),
    )
    def scraped(
        self,
        *,
        name: EndpointName,
        running: int,
        waiting: int,
        counters: tuple[float | None, ...],
        capacity: int | None,
        active: frozenset[str],
    ) -> None:
        """Report counters of any value. About half of them fall, as they do when a server restarts."""
        prompt, cached, generated, finished, begun = counters
        metrics = EndpointMetrics(
            scraped_at=self.now,
            running=running,
            waiting=waiting,
            capacity_tokens=capacity,
            block_size=16,
            prompt_tokens=prompt,
            cached_prompt_tokens=cached,
            generated_tokens=generated,
            finished=finished,
            ttft_count=begun,
            active_adapters=active,
        )
        self.picker.news.observe(name, metrics, now=self.now)

    @rule(name=st.sampled_from(NAMES))
    def scrape_fails(self, name: EndpointName) -> None:
        self.picker.news.observe(name, None, now=self.now)

    @rule(spec=policies)
    def policy_changes(self, spec: PolicySpec) -> None:
        self.picker.set_policy(policy_of(spec))

    @rule()
    def quiet_moment(self) -> None:
        self.picker.housekeep(now=self.now)

    # -- requests --------------------------------------------------------------------------------------------

    @rule(prompt=prompts, stream=st.booleans(), count=st.integers(1, 4))
    def burst(self, *, prompt: bytes, stream: bool, count: int) -> None:
        """Send equal plain requests, so that most sequences have open requests."""
        for _ in range(count):
            self.pick_one(prompt=prompt, stream=stream)

    @rule(
        prompt=prompts,
        model=st.sampled_from(["", "m", "x", "y"]),
        salt=st.sampled_from(["", "s"]),
        stream=st.booleans(),
        token_ids=st.booleans(),
        subset=st.none() | st.frozensets(addresses, max_size=3),
        prescribed=st.none() | st.lists(addresses, max_size=2).map(tuple),
    )
    def pick_one(
        self,
        *,
        prompt: bytes,
        model: str = "",
        salt: str = "",
        stream: bool = False,
        token_ids: bool = False,
        subset: frozenset[Address] | None = None,
        prescribed: tuple[Address, ...] | None = None,
    ) -> None:
        inference = InferenceRequest(
            kind=ApiKind.COMPLETIONS,
            model=model,
            prompt=prompt,
            cache_salt=salt,
            stream=stream,
            token_ids=token_ids,
        )
        request = Question(
            request_id="r", inference=inference, body_bytes=99, subset=subset, prescribed=prescribed
        )
        entries = self.picker.caches.table.entries
        try:
            pick = self.picker.pick(request, now=self.now)
        except (NoEndpointError, SaturatedError):
            assert self.picker.caches.table.entries == entries  # the invariants then find nothing booked
            return
        chosen = pick.decision.chosen
        by_address = {e.address: e.name for e in self.picker.news.endpoints()}
        assert by_address[pick.destinations[0]] == chosen
        assert len(set(pick.destinations)) == len(pick.destinations)
        assert set(pick.destinations) <= by_address.keys()
        assert subset is None or set(pick.destinations) <= subset
        assert 0 <= pick.decision.matched_tokens <= max(0, pick.decision.prompt_tokens - 1)
        self.open.append(OpenRequest(pick, (chosen, self.memberships[chosen]), pick.destinations[0]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), status=st.sampled_from([200, 400, 503]))
    def response_headers(self, data: st.DataObject, status: int) -> None:
        """The first choice answers, or another server, or one that the fleet never had. Only the first
        headers count.
        """
        request = data.draw(st.sampled_from(self.open))
        served = data.draw(st.none() | st.sampled_from(request.pick.destinations) | addresses)
        known = request.pick.decision.status
        self.picker.on_response_headers(request.pick, status=status, served=served, now=self.now)
        assert request.pick.decision.status == (status if known is None else known)
        if known is None and served is not None and served != request.served:
            by_address = {e.address: e.name for e in self.picker.news.endpoints()}
            name = by_address.get(served)
            request.holder = (name, self.memberships[name]) if name else None
            request.served = served

    @precondition(lambda self: self.open or self.over)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 5000))
    def feedback(self, *, data: st.DataObject, tokens: int | None) -> None:
        """Report a sampled answer. It may also come after the end."""
        pick = data.draw(st.sampled_from([r.pick for r in self.open] + self.over))
        feedback = ResponseFeedback(first_token_at=self.now, prompt_tokens=tokens, cached_tokens=tokens)
        self.picker.on_feedback(pick, feedback, now=self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["ended", "aborted", "failed", "detached"]))
    def request_ends(
        self, data: st.DataObject, how: Literal["ended", "aborted", "failed", "detached"]
    ) -> None:
        request = data.draw(st.sampled_from(self.open))
        self.open.remove(request)
        self.over.append(request.pick)
        if how == "detached":
            self.picker.detach(request.pick, now=self.now)
        else:
            self.picker.end(request.pick, outcome=how, now=self.now)
        finished = how == "detached" and request.pick.decision.status is not None
        assert finished or request.pick.decision.outcome == how

    @precondition(lambda self: self.over)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["ended", "aborted", "failed"]),
        status=st.sampled_from([200, 500]),
    )
    def reported_again(self, data: st.DataObject, outcome: Outcome, status: int) -> None:
        """A second end, or anything after an end, changes nothing."""
        pick = data.draw(st.sampled_from(self.over))
        before = (pick.decision.outcome, pick.decision.status, self.picker.caches.table.entries)
        self.picker.end(pick, outcome=outcome, now=self.now)
        self.picker.detach(pick, now=self.now)
        self.picker.on_response_headers(pick, status=status, served=HOSTS[5], now=self.now)
        assert (pick.decision.outcome, pick.decision.status, self.picker.caches.table.entries) == before

    # -- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        check_picker(self.picker)

    @invariant()
    def every_booking_is_where_it_should_be(self) -> None:
        expected = Counter(request.holder for request in self.open)
        for state in self.picker.fleet.states():
            name = state.endpoint.name
            assert state.in_flight == expected[name, self.memberships[name]], name
            assert state.in_flight <= state.loads[0]

    def teardown(self) -> None:
        for request in self.open:
            self.picker.end(request.pick, outcome="ended", now=self.now)
        for now in (1e6, 1e6 + 1):  # no prefill takes so long, and the servers are idle
            page = EndpointMetrics(scraped_at=now, running=0, waiting=0)
            for name in NAMES:
                self.picker.news.observe(name, page, now=now)
        check_settled(self.picker)
        self.invariants_hold()


TestPickerMachine = pytest.mark.slow(PickerMachine.TestCase)
TestPickerMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
