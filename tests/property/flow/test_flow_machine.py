"""Whatever happens in any order, each request goes once, is refused once, or leaves, and bounds and order
hold.

The machine takes the place of the transport: it offers requests, takes some back, lets time pass, changes
settings and the fleet, and calls `next`. It keeps its own list of waiting requests and compares.
"""

from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.base.errors import FlowRefusedError
from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.control import HEADROOM_S, PATIENCE, FlowControl, Forecast
from epp.picker.flow.queues import _BY_PLACE, QueueItem
from tests.invariants.flow import check_flow
from tests.unit.picker.flow.a_fleet import RATE, AFleet, Ask, FlowGateway

MOST_FORECASTS = 4
"""The most forecasts to find one request that may go."""
MOST_PUSHED_OUT = 64
"""A new request pushes out at most this many waiting requests."""

asks = st.builds(Ask, tokens=st.integers(1, 3000), home=st.integers(-1, 2))
bounds = st.sampled_from(
    [
        WaitingSettings(),
        WaitingSettings(max_requests=3),
        WaitingSettings(max_requests=6),
        WaitingSettings(max_bytes=200),
    ]
)
all_settings = st.builds(
    Flow,
    order=st.sampled_from(["Arrival", "Shortest"]),
    deadline_seconds=st.sampled_from([0.0, 0.5, 2.0]),
    ttl_seconds=st.sampled_from([3600.0, 3.0]),
    in_all=bounds,
    per_tenant=bounds,
    max_tenants=st.sampled_from([1, 2, 256]),
)


class FlowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = AFleet(2)
        self.settings = Flow()
        self.flow: FlowControl[Ask] = FlowControl(self.settings, self.fleet)
        self.waiting: dict[int, QueueItem[Ask]] = {}
        self.fates: Counter[str] = Counter()
        self.offered = 0
        self.draining = False

    # -- the world -------------------------------------------------------------------------------------------

    @rule(seconds=st.floats(0, 2))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(num_servers=st.integers(0, 3))
    def the_fleet_changes(self, num_servers: int) -> None:
        kept = self.fleet.busy_until[:num_servers]
        self.fleet.busy_until = kept + [self.now] * (num_servers - len(kept))

    @rule(changed=all_settings)
    def the_policy_changes(self, changed: Flow) -> None:
        self.settings = changed
        self.draining = False  # the queue has a policy again
        self.flow.apply(changed, now=self.now)
        self.pump()

    @rule()
    def the_process_drains(self) -> None:
        self.draining = True
        self.flow.drain()
        self.pump()
        assert not self.waiting

    # -- requests --------------------------------------------------------------------------------------------

    @rule(
        ask=asks,
        count=st.integers(1, 6),
        priority=st.integers(-1, 3),
        tenant=st.sampled_from("abc"),
        size_bytes=st.sampled_from([0, 10, 90, 300]),
        ttft_s=st.sampled_from([None, None, 0.3, 4.0]),
    )
    def requests_come(
        self, *, ask: Ask, count: int, priority: int, tenant: str, size_bytes: int, ttft_s: float | None
    ) -> None:
        for _ in range(count):
            self.offered += 1
            forecast = self.fleet.forecast(ask, now=self.now)
            try:
                fate = self.flow.offer(
                    ask,
                    forecast,
                    priority=priority,
                    tenant=tenant,
                    size_bytes=size_bytes,
                    left_s=ttft_s if ttft_s is not None else self.settings.deadline_seconds or inf,
                    longest_s=inf,
                    now=self.now,
                )
            except FlowRefusedError:
                self.fates["refused"] += 1
            else:
                if isinstance(fate, QueueItem):
                    self.waiting[fate.number] = fate
                else:
                    assert self.draining or (forecast.wait_s <= HEADROOM_S and not self.waiting)
                    self.fates["let go"] += 1
                    self.fleet.take(ask, now=self.now)
            self.pump()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        item = self.waiting.pop(number)
        self.flow.leave(item)
        self.flow.leave(item)
        self.fates["left"] += 1

    @rule()
    def pump(self) -> None:
        while (decided := self.flow.next(now=self.now)) is not None:
            self.decided(*decided)

    @rule()
    def woken(self) -> None:
        """Call at the very moment that was asked for, as the transport's timer does."""
        if self.flow.due_at < inf:
            self.now = max(self.now, self.flow.due_at)
        self.pump()

    # -- what must be true of a verdict ----------------------------------------------------------------------

    def decided(self, item: QueueItem[Ask], refusal: Forecast | FlowRefusedError) -> None:
        assert self.waiting.pop(item.number) is item
        assert not item.waits
        if isinstance(refusal, Forecast):
            self.fates["let go"] += 1
            self.check_order(item)
            self.fleet.take(item.payload, now=self.now)
            return
        self.fates["refused"] += 1
        assert not self.draining or refusal.reason == "flow_full"
        assert 1 <= refusal.retry_after_s <= 3600
        forecast = self.fleet.forecast(item.payload, now=self.now)
        if refusal.reason == "flow_deadline":
            # Rounding can make the sums equal, although the forecast is longer than the time that was left.
            assert self.now + forecast.wait_s + forecast.own_s >= item.deadline
        elif refusal.reason == "flow_ttl":
            assert self.now >= item.expires_at
        else:
            self.check_worth(item)

    def check_order(self, gone: QueueItem[Ask]) -> None:
        """There was room, and no request was overtaken by one that stands behind it."""
        if self.draining:
            return
        assert self.fleet.forecast(gone.payload, now=self.now).wait_s <= HEADROOM_S
        if len(self.waiting) >= MOST_FORECASTS:
            return
        for other in self.waiting.values():
            same_flow = (other.priority, other.tenant) == (gone.priority, gone.tenant)
            if other.look_at > self.now:
                continue  # its server was busy a moment ago
            if other.priority > gone.priority or (same_flow and _BY_PLACE(other) < _BY_PLACE(gone)):
                assert self.fleet.forecast(other.payload, now=self.now).wait_s > HEADROOM_S

    def check_worth(self, refused: QueueItem[Ask]) -> None:
        """Where only the bound of all requests can have been passed, a request that is worth less goes on
        waiting only if the new request would be too large even without all such requests, or without the
        first `MOST_PUSHED_OUT` of them: pushing them out would then help nobody.
        """
        if self.settings.per_tenant != WaitingSettings():
            return
        most_bytes = self.settings.in_all.max_bytes
        waiting = [h for h in self.waiting.values() if h.waits]
        worth_less = [h for h in waiting if h.priority < refused.priority]
        if not worth_less or refused.size_bytes > most_bytes or len(worth_less) > MOST_PUSHED_OUT:
            return
        freed = sum(h.size_bytes for h in worth_less)
        assert freed < refused.size_bytes
        assert sum(h.size_bytes for h in waiting) - freed + refused.size_bytes > most_bytes

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        check_flow(self.flow)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.flow) == len(self.waiting)
        assert sum(self.fates.values()) + len(self.waiting) == self.offered

    @invariant()
    def bounds_hold(self) -> None:
        all_that_wait = list(self.waiting.values())
        self.check_bound(self.settings.in_all, all_that_wait)
        for flow in {(h.priority, h.tenant) for h in all_that_wait}:
            of_flow = [h for h in all_that_wait if (h.priority, h.tenant) == flow]
            self.check_bound(self.settings.per_tenant, of_flow)

    def check_bound(self, bound: WaitingSettings, waiting: list[QueueItem[Ask]]) -> None:
        assert len(waiting) <= bound.max_requests
        assert sum(item.size_bytes for item in waiting) <= bound.max_bytes

    @invariant()
    def it_is_woken_while_somebody_waits(self) -> None:
        assert not self.waiting or self.flow.due_at < inf

    def teardown(self) -> None:
        """In the end every waiting request goes or is refused, even if only time passes."""
        self.pump()
        for _ in range(400 + 60 * len(self.waiting)):
            if not self.waiting:
                break
            assert self.flow.due_at > self.now
            self.now = self.flow.due_at
            self.pump()
        assert not self.waiting
        assert sum(self.fates.values()) == self.offered
        self.sound()


TestFlowMachine = pytest.mark.slow(FlowMachine.TestCase)
TestFlowMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@given(
    sizes=st.lists(st.lists(st.integers(1, 1000), min_size=30, max_size=60), min_size=2, max_size=4),
    seconds=st.floats(1, 8),
)
@settings(max_examples=80, deadline=None)
def test_the_lead_of_a_tenant_over_one_that_waits_is_bounded(sizes: list[list[int]], seconds: float) -> None:
    """With equal servers, the lead is at most the tokens of one request on each side."""
    fleet = AFleet(2)
    fleet.busy_until = [0.5, 0.5]  # All requests wait before the first goes.
    gate = FlowGateway(Flow(), fleet)
    left = {f"tenant-{n}": len(tokens) for n, tokens in enumerate(sizes)}
    for number in range(60):
        for n, tokens in enumerate(sizes):
            if number < len(tokens):
                gate.offer(Ask(tokens[number]), tenant=f"tenant-{n}", now=0.0)
    gate.run(now=0.0, until=seconds)
    had: Counter[str] = Counter(dict.fromkeys(left, 0))
    for item in gate.let_go:
        had[item.tenant] += item.payload.tokens
        left[item.tenant] -= 1
        if min(left.values()) == 0:
            break
        assert max(had.values()) - min(had.values()) <= 2000


@given(tokens=st.integers(1, 1000))
@settings(max_examples=20, deadline=None)
def test_with_order_shortest_a_request_waits_for_a_bounded_time(tokens: int) -> None:
    """Shorter requests go before it only if they come within its patience."""
    fleet = AFleet(1)
    gate = FlowGateway(Flow(order="Shortest"), fleet)
    gate.offer(Ask(1000), now=0.0)
    item = gate.offer(Ask(tokens), now=0.0)
    now = 0.0
    while item.waits:  # Twice as much work arrives as the server can do, for as long as the request waits.
        for _ in range(2):
            gate.offer(Ask(100), now=now)
        gate.run(now=now, until=now + 0.1)
        now += 0.1
        assert now <= 2 + 3 * PATIENCE * tokens / RATE


@given(tokens=st.lists(st.integers(1, 1000), min_size=1, max_size=50))
@settings(max_examples=40, deadline=None)
def test_a_light_tenant_waits_for_one_request_of_each_other_at_most(tokens: list[int]) -> None:
    fleet = AFleet(1)
    gate = FlowGateway(Flow(), fleet)
    gate.offer(Ask(1000), tenant="greedy", now=0.0)
    for size in tokens:
        gate.offer(Ask(size), tenant="greedy", now=0.0)
    light = gate.offer(Ask(10), tenant="light", now=0.0)
    gate.run(now=0.0, until=2.0 + 1e-9)
    assert light in gate.let_go
